{{/*
Probes. Readiness is the service's own gRPC health: false until it serves and again while it
drains. Liveness begins once startup has succeeded, so it needs no initial delay. An engine is
alive while its core makes progress, which its health tells; but health is also false during a
drain, so liveness waits for longer than a drain may take. The other services answer the health
service "liveness" from their event loop, during a drain as well; a TCP connect would also succeed
while that loop stands still. With mutual TLS the kubelet cannot ask, and the image's own probe does.
Usage: include "inferfleet.probes" (dict "root" $ "ports" .ports "startSeconds" 60 "progress" true)
*/}}
{{- define "inferfleet.probes" -}}
startupProbe:
  {{- include "inferfleet.healthCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  # 5 s each: at least startSeconds in all.
  failureThreshold: {{ add 1 (div (add (int .startSeconds) 4) 5) }}
readinessProbe:
  {{- include "inferfleet.healthCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- if .progress }}
  {{- include "inferfleet.healthCheck" . | nindent 2 }}
  {{- else }}
  {{- include "inferfleet.healthCheck" (merge (dict "service" "liveness") .) | nindent 2 }}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ ternary (add 12 (div (int .root.Values.drainGraceSeconds) 10)) 6 (default false .progress) }}
{{- end -}}

{{- define "inferfleet.healthCheck" -}}
{{- if .root.Values.tls.existingSecret -}}
exec: {command: [python, -m, services.common.service.probe{{ with .service }}, --service={{ . }}{{ end }}]}
{{- else -}}
grpc: {port: {{ .ports.grpc }}{{ with .service }}, service: {{ . }}{{ end }}}
{{- end -}}
{{- end -}}
