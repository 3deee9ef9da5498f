{{/* The count of a workload: (list $ pool apiVersion kind name). The autoscaler's stays where there is one: what runs now, since
Kubernetes would take a count that is named no longer for 1. */}}
{{- define "kvxfer.replicas" -}}
{{- $ := index . 0 -}}
{{- if or (not $.Values.autoscaler.enabled) $.Values.autoscaler.dryRun -}}
replicas: {{ (index . 1).replicas }}
{{- else -}}
{{- $spec := (lookup (index . 2) (index . 3) $.Release.Namespace (index . 4)).spec | default dict -}}
{{- if hasKey $spec "replicas" -}}
replicas: {{ int $spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The pod of a worker: (list $ role pool leader). The pods of a group but its leader run ranks of the leader's vLLM:
they serve no HTTP and are no instance. */}}
{{- define "kvxfer.workerPod" -}}
{{- $ := index . 0 -}}
{{- $role := index . 1 -}}
{{- $pool := index . 2 -}}
{{- $leader := index . 3 -}}
{{- $vllm := eq $pool.engine "vllm" -}}
{{- $rdma := ne $pool.rdma.resource "" -}}
metadata:
  labels:
    {{- $labels := include "kvxfer.podLabels" (list $ (ternary $role (printf "%s-rank" $role) $leader)) | fromYaml }}
    {{- toYaml (merge $labels (dict "kvxfer/workers" $.Release.Name) $pool.podLabels) | nindent 4 }}
  {{- with $pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "kvxfer.graceSeconds" $pool }}
  {{- if $pool.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- if $pool.podSecurityContext }}
    {{- toYaml $pool.podSecurityContext | nindent 4 }}
    {{- else if and $rdma $pool.rdma.asRoot }}
    runAsUser: 0
    fsGroup: 0
    seccompProfile: {type: RuntimeDefault}
    {{- else }}
    {{- include "kvxfer.podSecurityContext" (list $ 10001) | nindent 4 }}
    {{- end }}
  {{- with include "kvxfer.placement" $pool | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ ternary "vllm" "worker" $vllm }}
      image: {{ include "kvxfer.image" (list $ ($pool.image.repository | default (ternary "kvxfer-vllm" "kvxfer-worker" $vllm)) $pool.image.tag) }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      {{- if $vllm }}
      command: [python3, -m, vllm.entrypoints.cli.main, serve]
      {{- else }}
      command: [kvxfer, worker]
      {{- end }}
      args:
        {{- $args := include (ternary "kvxfer.vllmArguments" "kvxfer.referenceArguments" $vllm) (list $ $role $pool $leader) | fromJsonArray }}
        {{- include "kvxfer.arguments" (concat $args $pool.extraArgs) | nindent 8 }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: NODE_NAME
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        # All ranks of an instance have its name: that of the leader's pod.
        - name: KVXFER_INSTANCE_ID
          {{- if $leader }}
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
          {{- else }}
          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']"}}
          {{- end }}
        {{- include "kvxfer.clientEnv" $ | nindent 8 }}
        {{- with include "kvxfer.tracingEnv" $ }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if $vllm }}
        - {name: KVXFER_HOST, value: $(POD_IP)}
        - {name: KVXFER_HTTP_PORT, value: {{ $pool.port | quote }}}
        {{- end }}
        # A UID that the image does not know has neither a home nor a name.
        - {name: HOME, value: /tmp}
        - {name: USER, value: kvxfer}
        - {name: XDG_CACHE_HOME, value: /var/cache/kvxfer}
        - {name: HF_HOME, value: /var/cache/kvxfer/huggingface}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $leader }}
      {{- $health := ternary "/health" "/healthz" $vllm }}
      ports:
        - {name: http, containerPort: {{ $pool.port }}}
      readinessProbe:
        httpGet: {path: {{ $health }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      livenessProbe:
        httpGet: {path: {{ $health }}, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      startupProbe:
        httpGet: {path: {{ $health }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $pool.startupSeconds 4) 5 }}
      # No new requests; those that it has end, or the deadline does. Then comes SIGTERM.
      lifecycle:
        preStop: {exec: {command: [kvxfer, drain, --until=idle, --deadline={{ max 0 (sub $pool.drainSeconds 15) }}]}}
      {{- end }}
      resources:
        {{- $extra := dict }}
        {{- if $rdma }}
        {{- $_ := set $extra $pool.rdma.resource $pool.rdma.count }}
        {{- end }}
        {{- if $pool.hugepages.amount }}
        {{- $_ := set $extra (printf "hugepages-%s" $pool.hugepages.size) $pool.hugepages.amount }}
        {{- end }}
        {{- range $which := list "requests" "limits" }}
        {{- with merge (index $pool.resources $which | default dict) $extra }}
        {{ $which }}:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- end }}
      securityContext:
        {{- if $pool.securityContext }}
        {{- toYaml $pool.securityContext | nindent 8 }}
        {{- else }}
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: {{ not $vllm }}
        capabilities: {drop: [ALL]{{ if and $rdma (not $.Values.platformUsers) }}, add: [IPC_LOCK]{{ end }}}
        {{- end }}
      volumeMounts:
        {{- include "kvxfer.clientMounts" $ | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /var/cache/kvxfer}
        {{- if $pool.shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $pool.hugepages.amount }}
        - {name: hugepages, mountPath: /dev/hugepages}
        {{- end }}
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "kvxfer.clientVolumes" (list $ "worker-token" "cluster-key") | nindent 4 }}
    - name: tmp
      emptyDir: {}
    - name: cache
      {{- if $pool.modelClaim }}
      persistentVolumeClaim: {claimName: {{ $pool.modelClaim }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- if $pool.shm }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.shm }}}
    {{- end }}
    {{- if $pool.hugepages.amount }}
    - name: hugepages
      emptyDir: {medium: HugePages-{{ $pool.hugepages.size }}}
    {{- end }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The drain, what a vLLM that was told to stop still answers, and the stop. */}}
{{- define "kvxfer.graceSeconds" -}}
{{- add (mul (ternary 2 1 (eq .engine "vllm")) .drainSeconds) 30 -}}
{{- end -}}

{{/* Where a worker runs, as labels for near pairs. */}}
{{- define "kvxfer.where" -}}
{{- merge (dict "host" "$(NODE_NAME)") .labels | toRawJson -}}
{{- end -}}

{{- define "kvxfer.referenceArguments" -}}
{{- $ := index . 0 -}}
{{- $pool := index . 2 -}}
{{- $args := list (printf "--role=%s" (index . 1)) "--host=$(POD_IP)" (printf "--port=%v" $pool.port) -}}
{{- $args = append $args (printf "--blocks=%d" (int64 $pool.blocks)) -}}
{{- $args = append $args "--cluster-key-file=/etc/kvxfer/secret/cluster-key" -}}
{{- with $pool.model -}}{{- $args = append $args (printf "--model=%s" .) -}}{{- end -}}
{{- with $pool.fabrics -}}{{- $args = append $args (printf "--fabrics=%s" (join "," .)) -}}{{- end -}}
{{- $options := omit $pool.transferEngine "tuning" -}}
{{- range $name, $value := $pool.transferEngine.tuning -}}{{- $_ := set $options (printf "tuning.%s" $name) $value -}}{{- end -}}
{{- range $name, $value := $options -}}
{{- $text := kindIs "slice" $value | ternary (join "," $value) (kindIs "string" $value | ternary $value (toRawJson $value)) -}}
{{- $args = append $args (printf (ternary "--%s=%s" "--engine-option=%s=%s" (eq $name "peer_timeout")) (replace "peer_timeout" "peer-timeout" $name) $text) -}}
{{- end -}}
{{- if $pool.checksums -}}{{- $args = append $args "--checksums" -}}{{- end -}}
{{- range $name, $value := include "kvxfer.where" $pool | fromJson -}}
{{- $args = append $args (printf "--label=%s=%s" $name $value) -}}
{{- end -}}
{{- concat $args (list (printf "--log-level=%s" $.Values.log.level) (printf "--log-format=%s" $.Values.log.format)) | toRawJson -}}
{{- end -}}

{{- define "kvxfer.vllmArguments" -}}
{{- $role := index . 1 -}}
{{- $pool := index . 2 -}}
{{- $extra := dict "instance_id" "$(KVXFER_INSTANCE_ID)" "cluster_key_file" "/etc/kvxfer/secret/cluster-key" -}}
{{- $_ := set $extra "labels" (include "kvxfer.where" $pool | fromJson) -}}
{{- with $pool.fabrics -}}{{- $_ := set $extra "fabrics" . -}}{{- end -}}
{{- if $pool.checksums -}}{{- $_ := set $extra "checksums" true -}}{{- end -}}
{{- $transfer := dict "kv_connector" "KvxferConnector" "kv_connector_module_path" "kvxfer.connectors.vllm.connector" -}}
{{- $_ := set $transfer "kv_role" (ternary "kv_producer" "kv_consumer" (eq $role "prefill")) -}}
{{- $_ := set $transfer "kv_connector_extra_config" (merge $extra $pool.transferEngine $pool.connector) -}}
{{- $args := list (printf "--model=%s" $pool.model) "--host=$(POD_IP)" (printf "--port=%v" $pool.port) "--enable-scale-out" -}}
{{- $args = append $args (printf "--shutdown-timeout=%d" (int64 $pool.drainSeconds)) -}}
{{- $args = append $args (printf "--kv-transfer-config=%s" (toRawJson $transfer)) -}}
{{- if gt (int $pool.groupSize) 1 -}}
{{- $args = concat $args (list (printf "--nnodes=%d" (int64 $pool.groupSize)) "--node-rank=$(LWS_WORKER_INDEX)" "--master-addr=$(LWS_LEADER_ADDRESS)") -}}
{{- if not (index . 3) -}}{{- $args = append $args "--headless" -}}{{- end -}}
{{- end -}}
{{- $args | toRawJson -}}
{{- end -}}
