{{/* Names. Every one leaves room for the longest suffix and stays a DNS label. */}}

{{/* <release>-inferfleet, or the release alone if its name contains inferfleet. */}}
{{- define "inferfleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 26 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 26 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 26 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "inferfleet.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "inferfleet.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "inferfleet.fleetTokenSecret" -}}
{{- .Values.fleetToken.existingSecret | default (printf "%s-fleet-token" (include "inferfleet.fullname" .)) -}}
{{- end -}}

{{/* The headless service that gives the pods of a component names of their own. */}}
{{- define "inferfleet.podsService" -}}
{{- printf "%s-%s-pods" (include "inferfleet.fullname" .root) .component -}}
{{- end -}}

{{/* The DNS name of a pod of a StatefulSet, for `advertise`; POD_NAME is set by the kubelet. */}}
{{- define "inferfleet.podAddress" -}}
{{- printf "$(POD_NAME).%s.%s.svc" (include "inferfleet.podsService" .) .root.Release.Namespace -}}
{{- end -}}

{{- define "inferfleet.kvcacheAddress" -}}
{{- if .Values.kvcache.enabled -}}
{{- printf "%s-kvcache.%s.svc:%d" (include "inferfleet.fullname" .) .Release.Namespace (int .Values.kvcache.ports.grpc) -}}
{{- end -}}
{{- end -}}

{{- define "inferfleet.etcdEndpoints" -}}
{{- if eq (include "inferfleet.etcdBuiltin" .) "true" -}}
{{- printf "%s-etcd.%s.svc:2379" (include "inferfleet.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- join "," .Values.etcd.endpoints -}}
{{- end -}}
{{- end -}}

{{- define "inferfleet.redisUrl" -}}
{{- if eq (include "inferfleet.redisBuiltin" .) "true" -}}
{{- printf "redis://%s-redis.%s.svc:6379/0" (include "inferfleet.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- .Values.redis.url -}}
{{- end -}}
{{- end -}}

{{/* Where gateways count quotas together: the Redis of the index, if one URL says it. Quotas need
keys; a list of servers and Sentinels are for the index alone. */}}
{{- define "inferfleet.quotaRedis" -}}
{{- $url := include "inferfleet.redisUrl" . -}}
{{- if and .Values.gateway.apiKeys.existingSecret $url (not (contains "," $url)) (not (contains "sentinel" $url)) -}}
{{- $url -}}
{{- end -}}
{{- end -}}

{{/* A named store wins over the built-in one. */}}
{{- define "inferfleet.redisBuiltin" -}}
{{- and .Values.kvcache.enabled .Values.redis.builtin (not .Values.redis.url) -}}
{{- end -}}

{{- define "inferfleet.etcdBuiltin" -}}
{{- and .Values.etcd.builtin (not .Values.etcd.endpoints) -}}
{{- end -}}
