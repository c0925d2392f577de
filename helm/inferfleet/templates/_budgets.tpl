{{/* JSON list of what a budget may be for: component, replicas and, for a model's engines, its name. */}}
{{- define "inferfleet.budgets" -}}
{{- $gateways := .Values.gateway.replicas -}}
{{- if .Values.gateway.autoscaling.enabled }}{{ $gateways = .Values.gateway.autoscaling.minReplicas }}{{ end -}}
{{- $budgets := list (dict "component" "gateway" "replicas" $gateways) (dict "component" "balancer" "replicas" .Values.balancer.replicas) -}}
{{- if .Values.kvcache.enabled -}}
{{- $budgets = append $budgets (dict "component" "kvcache" "replicas" .Values.kvcache.replicas) -}}
{{- end -}}
{{- range .Values.engines -}}
{{- $e := include "inferfleet.engine" (dict "root" $ "entry" .) | fromYaml -}}
{{- $budgets = append $budgets (dict "component" "engine" "engine" $e.name "replicas" $e.replicas) -}}
{{- end -}}
{{- $budgets | toJson -}}
{{- end -}}
