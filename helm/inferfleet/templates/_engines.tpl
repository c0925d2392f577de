{{/* An entry of `engines`, completed. */}}

{{/*
engineDefaults with the entry's keys over them; config and resources key by key, null for none. sprig's merge
functions are no use: they take a false or a 0 for an absent value.
Usage: include "inferfleet.engine" (dict "root" $ "entry" .) | fromYaml
*/}}
{{- define "inferfleet.engine" -}}
{{- $engine := deepCopy .root.Values.engineDefaults -}}
{{- range $key, $value := .entry -}}
{{- if and (has $key (list "config" "resources")) (kindIs "map" $value) -}}
{{- $merged := get $engine $key | default dict -}}
{{- range $inner, $own := $value -}}
{{- $_ := set $merged $inner $own -}}
{{- end -}}
{{- $_ := set $engine $key $merged -}}
{{- else -}}
{{- $_ := set $engine $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $engine -}}
{{- end -}}

{{- define "inferfleet.engineFullname" -}}
{{- printf "%s-engine-%s" (include "inferfleet.fullname" .root) .name -}}
{{- end -}}

{{/* Requests and limits, GPUs added for a CUDA engine. */}}
{{- define "inferfleet.engineResources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- if eq .device "cuda" -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $limits "nvidia.com/gpu" (int .gpus) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The volume at /models; nothing if the image brings its own. Usage: dict "root" $ "engine" $e */}}
{{- define "inferfleet.modelVolume" -}}
{{- with .engine.modelVolume -}}
- name: models
  {{- if .hostPath }}
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
  {{- else if .existingClaim }}
  persistentVolumeClaim: {claimName: {{ .existingClaim }}}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ include "inferfleet.engineFullname" (dict "root" $.root "name" $.engine.name) }}-models}
  {{- end }}
{{- end -}}
{{- end -}}

{{/*
Threads of a CPU engine = its CPU limit, unless config says otherwise: a container sees all cores of
its node, and more threads than it may use make every product slower.
*/}}
{{- define "inferfleet.engineThreads" -}}
{{- $limits := (.resources | default dict).limits | default dict -}}
{{- if and (eq .device "cpu") $limits.cpu (not (hasKey (.config | default dict) "threads")) -}}
- name: INFERFLEET_THREADS
  valueFrom: {resourceFieldRef: {containerName: engine, resource: limits.cpu}}
{{- end -}}
{{- end -}}
