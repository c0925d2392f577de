{{/* The services' configuration as environment variables: key foo_bar is INFERFLEET_FOO_BAR. */}}

{{/* A value as text. YAML numbers arrive as floats: 1000000 must not become 1e+06. */}}
{{- define "inferfleet.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{- int64 . -}}{{- else -}}{{- . -}}{{- end -}}
{{- else if kindIs "slice" . -}}
{{- join "," . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Usage: include "inferfleet.env" (dict "port" 50051 "etcd" "…"): one variable per key. */}}
{{- define "inferfleet.env" -}}
{{- range $key, $value := . }}
- name: INFERFLEET_{{ upper $key }}
  value: {{ include "inferfleet.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* The keys that every service has. Usage: dict "root" $ "ports" .Values.gateway.ports */}}
{{- define "inferfleet.commonKeys" -}}
host: 0.0.0.0
port: {{ .ports.grpc }}
metrics_port: {{ .ports.metrics }}
fleet_token_file: /etc/inferfleet/token/{{ .root.Values.fleetToken.key }}
log_level: {{ .root.Values.logLevel }}
drain_grace_s: {{ .root.Values.drainGraceSeconds }}
{{- with .root.Values.tracing.otlpEndpoint }}
otlp_endpoint: {{ . }}
{{- end }}
{{- if .root.Values.tls.existingSecret }}
tls_ca_file: /etc/inferfleet/tls/ca.crt
tls_cert_file: /etc/inferfleet/tls/tls.crt
tls_key_file: /etc/inferfleet/tls/tls.key
{{- end }}
{{- end -}}

{{/* Where etcd is, and what names the files of its Secrets: gateway, balancers and engines. */}}
{{- define "inferfleet.etcdKeys" -}}
etcd: {{ include "inferfleet.etcdEndpoints" . | quote }}
{{- if .Values.etcd.auth.user }}
etcd_user: {{ .Values.etcd.auth.user | quote }}
etcd_password_file: /etc/inferfleet/etcd-auth/{{ .Values.etcd.auth.key }}
{{- end }}
{{- if .Values.etcd.tls.existingSecret }}
etcd_tls_ca_file: /etc/inferfleet/etcd-tls/ca.crt
{{- if .Values.etcd.tls.clientCertificate }}
etcd_tls_cert_file: /etc/inferfleet/etcd-tls/tls.crt
etcd_tls_key_file: /etc/inferfleet/etcd-tls/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{/* Keys of the KV-cache service that name files of Redis's Secrets. */}}
{{- define "inferfleet.redisSecretKeys" -}}
{{- if .Values.redis.auth.existingSecret }}
redis_password_file: /etc/inferfleet/redis-auth/{{ .Values.redis.auth.key }}
{{- end }}
{{- if .Values.redis.tls.existingSecret }}
redis_tls_ca_file: /etc/inferfleet/redis-tls/ca.crt
{{- if .Values.redis.tls.clientCertificate }}
redis_tls_cert_file: /etc/inferfleet/redis-tls/tls.crt
redis_tls_key_file: /etc/inferfleet/redis-tls/tls.key
{{- end }}
{{- end }}
{{- end -}}
