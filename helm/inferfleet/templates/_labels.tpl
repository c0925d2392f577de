{{/* Labels. Selectors are immutable, so they hold only what never changes. */}}

{{/* Usage: include "inferfleet.selectorLabels" (dict "root" $ "component" "gateway") */}}
{{- define "inferfleet.selectorLabels" -}}
app.kubernetes.io/name: inferfleet
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .engine }}
inferfleet/engine: {{ . }}
{{- end }}
{{- end -}}

{{/* Usage: include "inferfleet.labels" (dict "root" $ "component" "gateway") */}}
{{- define "inferfleet.labels" -}}
{{ include "inferfleet.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Every pod of the fleet's own services, stores excepted. */}}
{{- define "inferfleet.fleetExpressions" -}}
- {key: app.kubernetes.io/component, operator: In, values: [gateway, balancer, kvcache, engine]}
{{- end -}}
