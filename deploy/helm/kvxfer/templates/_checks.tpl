{{/* Values that fit the schema and contradict each other: each is one error that says what to set. */}}

{{- define "kvxfer.checks" -}}
{{- $v := .Values -}}
{{- if and $v.controlPlane.enabled (eq $v.registry.kind "embedded") (or (gt (int $v.controlPlane.replicas) 1) $v.controlPlane.autoscaling.enabled) -}}
{{- fail (printf "controlPlane: more than one replica (replicas %v, autoscaling.enabled %v) needs a registry that they share; set registry.kind to bundled or external" $v.controlPlane.replicas $v.controlPlane.autoscaling.enabled) -}}
{{- end -}}
{{- if and $v.controlPlane.enabled (eq $v.registry.kind "external") (not (or $v.registry.external.url $v.registry.external.existingSecret)) -}}
{{- fail "registry.kind is external and no Redis is named; set registry.external.url or registry.external.existingSecret" -}}
{{- end -}}
{{- if and $v.registry.external.url $v.registry.external.existingSecret -}}
{{- fail "registry.external: both url and existingSecret are set; keep one of them" -}}
{{- end -}}
{{- $clients := or $v.router.enabled $v.workers.prefill.enabled $v.workers.decode.enabled -}}
{{- if and (not $v.controlPlane.enabled) $clients (not $v.controlPlane.externalUrl) -}}
{{- fail "controlPlane.enabled is false and router or workers are there; set controlPlane.externalUrl to the control plane they belong to" -}}
{{- end -}}
{{- if and (not $v.controlPlane.enabled) $clients (not $v.auth.existingSecret) -}}
{{- fail "controlPlane.enabled is false and auth.existingSecret is empty; name the Secret with the cluster key and tokens of that control plane, as `helm install` of it made it" -}}
{{- end -}}
{{- if and $v.controlPlane.enabled $v.controlPlane.externalUrl -}}
{{- fail (printf "controlPlane.externalUrl is %s and controlPlane.enabled is true; set one of them" $v.controlPlane.externalUrl) -}}
{{- end -}}
{{- if and $v.tracing.enabled (not $v.tracing.endpoint) (or (gt (int $v.controlPlane.replicas) 1) $v.controlPlane.autoscaling.enabled) -}}
{{- fail "tracing.endpoint is empty and the control plane has several replicas, and each would keep only the spans that it receives; set it to a collector" -}}
{{- end -}}
{{- if $v.autoscaler.enabled -}}
{{- if not (and $v.controlPlane.enabled $v.workers.prefill.enabled $v.workers.decode.enabled) -}}
{{- fail "autoscaler.enabled is true; it needs controlPlane.enabled, workers.prefill.enabled and workers.decode.enabled in the same release" -}}
{{- end -}}
{{- if hasKey $v.autoscaler.policy "backend" -}}
{{- fail "autoscaler.policy.backend is the chart's to set; leave it out (autoscaler.dryRun: true for none)" -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := include "kvxfer.pool" (list $ $role) | fromJson -}}
{{- if $pool.enabled -}}
{{- if and (eq $pool.engine "vllm") (not $pool.model) -}}
{{- fail (printf "workers.%s: engine is vllm and model is empty; set workers.model, such as Qwen/Qwen3-0.6B" $role) -}}
{{- end -}}
{{- if and $.Values.platformUsers (ne $pool.rdma.resource "") $pool.rdma.asRoot -}}
{{- fail (printf "workers.%s: platformUsers is true and rdma.asRoot makes pods run as root; set rdma.asRoot to false, where locked memory of nodes is unlimited, or platformUsers to false" $role) -}}
{{- end -}}
{{- range $argument := $pool.extraArgs -}}
{{- if hasPrefix "--instance-id" (toString $argument) -}}
{{- fail (printf "workers.%s: extraArgs has %s, which all its pods would be named; leave it out: the name of an instance is that of its pod" $role $argument) -}}
{{- end -}}
{{- end -}}
{{- range $entry := $pool.extraEnv -}}
{{- if eq $entry.name "KVXFER_INSTANCE_ID" -}}
{{- fail (printf "workers.%s: extraEnv has KVXFER_INSTANCE_ID, which all its pods would be named; leave it out: the name of an instance is that of its pod" $role) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int $pool.groupSize) 1) (or (ne $pool.kind "LeaderWorkerSet") (ne $pool.engine "vllm")) -}}
{{- fail (printf "workers.%s: groupSize is %v with kind %s and engine %s; instances of several pods need kind LeaderWorkerSet and engine vllm" $role $pool.groupSize $pool.kind $pool.engine) -}}
{{- end -}}
{{- if not (or $pool.rollout.maxSurge $pool.rollout.maxUnavailable) -}}
{{- fail (printf "workers.%s: rollout.maxSurge and maxUnavailable are both 0, so no pod could ever be replaced; make one of them 1" $role) -}}
{{- end -}}
{{- range $name := list "name" "host" "port" "fabrics" -}}
{{- if hasKey $pool.transferEngine $name -}}
{{- fail (printf "workers.%s: transferEngine.%s is the chart's to set; use the value of that name, if there is one" $role $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $pool.transferEngine -}}
{{- if and (kindIs "map" $value) (ne $name "tuning") -}}
{{- fail (printf "workers.%s: transferEngine.%s is a map; only transferEngine.tuning is one" $role $name) -}}
{{- end -}}
{{- if hasKey $pool.connector $name -}}
{{- fail (printf "workers.%s: both transferEngine.%s and connector.%s are set; keep one of them" $role $name $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "instance_id" "cluster_key_file" "fabrics" "checksums" "labels" -}}
{{- if hasKey $pool.connector $name -}}
{{- fail (printf "workers.%s: connector.%s is the chart's to set; use the value of that name, if there is one" $role $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
