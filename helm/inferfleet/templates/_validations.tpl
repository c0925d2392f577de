{{/* What a schema cannot say. Each message begins with the value to change. */}}
{{- define "inferfleet.validate" -}}
{{- $wrong := list -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- $wrong = append $wrong "serviceAccount.name: needed, because serviceAccount.create is false" -}}
{{- end -}}
{{- if and .Values.kvcache.enabled (not .Values.redis.builtin) (not .Values.redis.url) -}}
{{- $wrong = append $wrong "redis.url: set it, or redis.builtin to try the chart out, or kvcache.enabled to false" -}}
{{- end -}}
{{- if and (not .Values.redis.url) (or .Values.redis.auth.existingSecret .Values.redis.tls.existingSecret) -}}
{{- $wrong = append $wrong "redis.url: needed with redis.auth or redis.tls; the built-in Redis has neither" -}}
{{- end -}}
{{- if and .Values.redis.tls.existingSecret (not (hasPrefix "rediss://" .Values.redis.url)) -}}
{{- $wrong = append $wrong "redis.tls.existingSecret: only for a redis.url that begins with rediss://" -}}
{{- end -}}
{{- if and (not .Values.etcd.builtin) (not .Values.etcd.endpoints) -}}
{{- $wrong = append $wrong "etcd.endpoints: set it, or etcd.builtin to try the chart out" -}}
{{- end -}}
{{- if and (not .Values.etcd.endpoints) (or .Values.etcd.auth.user .Values.etcd.auth.existingSecret .Values.etcd.tls.existingSecret) -}}
{{- $wrong = append $wrong "etcd.endpoints: needed with etcd.auth or etcd.tls; the built-in etcd has neither" -}}
{{- end -}}
{{- if and .Values.etcd.auth.user (not .Values.etcd.auth.existingSecret) -}}
{{- $wrong = append $wrong "etcd.auth.existingSecret: needed, because etcd.auth.user is set" -}}
{{- end -}}
{{- if and .Values.etcd.auth.existingSecret (not .Values.etcd.auth.user) -}}
{{- $wrong = append $wrong "etcd.auth.user: needed, because etcd.auth.existingSecret is set" -}}
{{- end -}}
{{- if and .Values.etcd.tls.clientCertificate (not .Values.etcd.tls.existingSecret) -}}
{{- $wrong = append $wrong "etcd.tls.existingSecret: needed, because etcd.tls.clientCertificate is set" -}}
{{- end -}}
{{- with .Values.gateway.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- $wrong = append $wrong "gateway.autoscaling.minReplicas: above maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.fleetToken.existingSecret (include "inferfleet.fleetToken" .)) -}}
{{- $wrong = append $wrong "fleetToken.existingSecret: needed: create the Secret and name it here. Only where Helm itself installs into the cluster may fleetToken.generate make one: each rendering without a cluster (helm template, GitOps) would make another" -}}
{{- end -}}
{{- with .Values.gateway.ingress -}}
{{- if and .enabled (not .hosts) -}}
{{- $wrong = append $wrong "gateway.ingress.hosts: needed, because gateway.ingress.enabled is true" -}}
{{- end -}}
{{- end -}}
{{- with .Values.gateway.httpRoute -}}
{{- if and .enabled (not .parentRefs) -}}
{{- $wrong = append $wrong "gateway.httpRoute.parentRefs: needed, because gateway.httpRoute.enabled is true" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gateway.service.loadBalancerSourceRanges (ne .Values.gateway.service.type "LoadBalancer") -}}
{{- $wrong = append $wrong "gateway.service.loadBalancerSourceRanges: only for gateway.service.type LoadBalancer; networkPolicy.gatewayFrom says who may call otherwise" -}}
{{- end -}}
{{- range $name := list "gateway" "balancer" "kvcache" -}}
{{- with include "inferfleet.strategyProblem" (dict "at" $name "values" (get $.Values $name) "stateful" (eq $name "balancer")) -}}
{{- $wrong = append $wrong . -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range $index, $entry := .Values.engines -}}
{{- $e := include "inferfleet.engine" (dict "root" $ "entry" $entry) | fromYaml -}}
{{- $at := printf "engines[%d]" $index -}}
{{- if has $e.name $names -}}
{{- $wrong = append $wrong (printf "%s.name: %s is taken by another entry" $at $e.name) -}}
{{- end -}}
{{- $names = append $names $e.name -}}
{{- if and (eq $e.device "cuda") (lt (int $e.gpus) 1) -}}
{{- $wrong = append $wrong (printf "%s.gpus: at least 1 for device cuda" $at) -}}
{{- end -}}
{{- with include "inferfleet.strategyProblem" (dict "at" $at "values" $e "stateful" true) -}}
{{- $wrong = append $wrong . -}}
{{- end -}}
{{- if gt (len ($e.modelVolume | default dict)) 1 -}}
{{- $wrong = append $wrong (printf "%s.modelVolume: one of existingClaim, hostPath, pvc" $at) -}}
{{- end -}}
{{- end -}}
{{- $wrong = concat $wrong (include "inferfleet.budgetProblems" . | fromJsonArray) -}}
{{- if $wrong -}}
{{- fail (printf "\n\n  %s\n" (join "\n  " $wrong)) -}}
{{- end -}}
{{- end -}}

{{/* An update that could never begin. Usage: dict "at" "gateway" "values" .Values.gateway "stateful" false */}}
{{- define "inferfleet.strategyProblem" -}}
{{- $rolling := (.values.strategy | default dict).rollingUpdate | default dict -}}
{{- $none := list "0" "0%" -}}
{{- if and (hasKey $rolling "maxUnavailable") (has (toString $rolling.maxUnavailable) $none) -}}
{{- if or .stateful (and (hasKey $rolling "maxSurge") (has (toString $rolling.maxSurge) $none)) -}}
{{- printf "%s.strategy.rollingUpdate.maxUnavailable: 0 lets no pod be replaced: set 1 or more%s" .at (ternary "" ", or maxSurge" .stateful) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* JSON list: budgets of 0, under which no drain could ever move a pod. One replica has no budget. */}}
{{- define "inferfleet.budgetProblems" -}}
{{- $found := list -}}
{{- if and .Values.podDisruptionBudget.enabled (has (toString .Values.podDisruptionBudget.maxUnavailable) (list "0" "0%")) -}}
{{- range include "inferfleet.budgets" . | fromJsonArray -}}
{{- if gt (int .replicas) 1 -}}
{{- $found = append $found (printf "podDisruptionBudget.maxUnavailable: 0 lets no pod of %s be evicted, so every drain of its node would wait for ever: set 1 or more, or podDisruptionBudget.enabled to false" (.engine | default .component)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}
