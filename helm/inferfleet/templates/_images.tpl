{{/*
The image of a component. An own `image` may replace repository, tag and digest.
Usage: include "inferfleet.image" (dict "root" $ "values" .Values.gateway "name" "gateway")
*/}}
{{- define "inferfleet.image" -}}
{{- $common := .root.Values.image -}}
{{- $own := .values.image | default dict -}}
{{- $registry := $common.registry | default "" -}}
{{- $repository := $own.repository | default (printf "%s-%s" $common.repository .name) -}}
{{- $name := ternary (printf "%s/%s" $registry $repository) $repository (ne $registry "") -}}
{{- if $own.digest -}}
{{- printf "%s@%s" $name $own.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($own.tag | default $common.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
