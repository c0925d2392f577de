{{/* The pod that all four services share. */}}

{{/*
What surrounds the container of a service.
Usage: dict "root" $ "component" "gateway" "engine" "" "values" .Values.gateway
*/}}
{{- define "inferfleet.podMeta" -}}
labels:
  {{- merge (include "inferfleet.labels" . | fromYaml) (.values.podLabels | default dict) | toYaml | nindent 2 }}
annotations:
  {{- merge (dict "checksum/secrets" (include "inferfleet.secretsChecksum" .root)) (.values.podAnnotations | default dict) | toYaml | nindent 2 }}
{{- end -}}

{{- define "inferfleet.podSettings" -}}
serviceAccountName: {{ include "inferfleet.serviceAccountName" .root }}
automountServiceAccountToken: false
# A Service called "inferfleet" would otherwise put its own INFERFLEET_PORT into every pod.
enableServiceLinks: false
# Streams drain for drain_grace_s; then there is time to hand the last spans over.
terminationGracePeriodSeconds: {{ add .root.Values.drainGraceSeconds 20 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $selector := include "inferfleet.selectorLabels" . | fromYaml }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  # Without a labelSelector a constraint counts the pods of this component.
  - {{- merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $selector)) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
affinity:
  {{- with .values.affinity }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 50
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "inferfleet.selectorLabels" . | nindent 14 }}
  {{- end }}
{{- end -}}

{{/* A container without rights, on a root it cannot write. */}}
{{- define "inferfleet.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "inferfleet.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: fleet-token, mountPath: /etc/inferfleet/token, readOnly: true}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/inferfleet/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "inferfleet.volumes" -}}
- name: tmp
  emptyDir: {}
- name: fleet-token
  secret: {secretName: {{ include "inferfleet.fleetTokenSecret" . }}, defaultMode: 0440}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Secrets of an etcd that asks for them, in the pods that have a part in it. */}}
{{- define "inferfleet.etcdMounts" -}}
{{- if .Values.etcd.auth.existingSecret }}
- {name: etcd-auth, mountPath: /etc/inferfleet/etcd-auth, readOnly: true}
{{- end }}
{{- if .Values.etcd.tls.existingSecret }}
- {name: etcd-tls, mountPath: /etc/inferfleet/etcd-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "inferfleet.etcdVolumes" -}}
{{- with .Values.etcd.auth.existingSecret }}
- name: etcd-auth
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.etcd.tls.existingSecret }}
- name: etcd-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Volumes and mounts of the operator's own. Usage: include "inferfleet.extraMounts" .Values.gateway */}}
{{- define "inferfleet.extraMounts" -}}
{{- with .extraVolumeMounts }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "inferfleet.extraVolumes" -}}
{{- with .extraVolumes }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Names of the pod that `advertise` and ids are made of. */}}
{{- define "inferfleet.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}
