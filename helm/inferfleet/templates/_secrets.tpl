{{/* The fleet token, and the checksum by which pods follow the Secrets that they read only once. */}}

{{/*
The token in base64: that of the cluster's Secret, else a new one if fleetToken.generate allows it,
else nothing, which _validations.tpl refuses. One rendering makes one token: it is kept in .Values.
*/}}
{{- define "inferfleet.fleetToken" -}}
{{- $own := .Values.fleetToken -}}
{{- if not (hasKey $own "_made") -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace (include "inferfleet.fleetTokenSecret" .) | default dict -}}
{{- $kept := dig "data" $own.key "" $secret -}}
{{- $_ := set $own "_made" ($kept | default (ternary (randAlphaNum 48 | b64enc) "" (default false $own.generate))) -}}
{{- end -}}
{{- get $own "_made" -}}
{{- end -}}

{{/*
Changes when a Secret changes that services read at their start only: the token and the stores'
passwords. Certificates and API keys are read again while a service runs. Rendered without a cluster
it knows the names alone.
*/}}
{{- define "inferfleet.secretsChecksum" -}}
{{- $read := list (include "inferfleet.fleetTokenSecret" .) -}}
{{- if not .Values.fleetToken.existingSecret -}}
{{- $read = append $read (include "inferfleet.fleetToken" .) -}}
{{- end -}}
{{- range $name := list .Values.fleetToken.existingSecret .Values.redis.auth.existingSecret .Values.etcd.auth.existingSecret -}}
{{- if $name -}}
{{- $secret := lookup "v1" "Secret" $.Release.Namespace $name | default dict -}}
{{- $read = concat $read (list $name (get $secret "data" | default dict | toJson)) -}}
{{- end -}}
{{- end -}}
{{- $read | toJson | sha256sum -}}
{{- end -}}
