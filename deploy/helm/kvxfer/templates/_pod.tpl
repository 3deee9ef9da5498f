{{/* What pods have in common. */}}

{{/* (list $ UID): without one where the platform gives each namespace its own. */}}
{{- define "kvxfer.podSecurityContext" -}}
runAsNonRoot: true
{{- if not (index . 0).Values.platformUsers }}
runAsUser: {{ index . 1 }}
runAsGroup: {{ index . 1 }}
fsGroup: {{ index . 1 }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Of files of secrets: their group is fsGroup, and only the platform knows whether a pod of it has one. */}}
{{- define "kvxfer.secretMode" -}}
{{- ternary "0444" "0440" .Values.platformUsers -}}
{{- end -}}

{{- define "kvxfer.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where a pod may run: the values of its part. */}}
{{- define "kvxfer.placement" -}}
{{- range $name := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with index $ $name }}
{{ dict $name . | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment of a client of the control plane. */}}
{{- define "kvxfer.clientEnv" -}}
- {name: KVXFER_CONTROL_PLANE, value: {{ include "kvxfer.controlPlaneUrl" . | quote }}}
- {name: KVXFER_TOKEN_FILE, value: /etc/kvxfer/secret/token}
{{- if .Values.tls.enabled }}
- {name: KVXFER_CA_FILE, value: /etc/kvxfer/ca/ca.crt}
{{- end }}
{{- end -}}

{{- define "kvxfer.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .enabled -}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | default (include "kvxfer.controlPlaneUrl" $) | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .ratio | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvxfer.clientMounts" -}}
- {name: secret, mountPath: /etc/kvxfer/secret, readOnly: true}
{{- if .Values.tls.enabled }}
- {name: ca, mountPath: /etc/kvxfer/ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* (list $ "key of the token" "further key" …): the token is the file `token`, the others have their key's name. */}}
{{- define "kvxfer.clientVolumes" -}}
{{- $ := index . 0 -}}
- name: secret
  secret:
    secretName: {{ include "kvxfer.secretName" $ }}
    defaultMode: {{ include "kvxfer.secretMode" $ }}
    items:
      - {key: {{ index . 1 }}, path: token}
      {{- range slice . 2 }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- if $.Values.tls.enabled }}
- name: ca
  secret:
    secretName: {{ include "kvxfer.tlsSecretName" $ }}
    defaultMode: {{ include "kvxfer.secretMode" $ }}
    items:
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- end -}}

{{/* What a server bears of its clients, as options: the values of its part. */}}
{{- define "kvxfer.limits" -}}
{{- $args := list (printf "--header-seconds=%v" .headerSeconds) (printf "--body-seconds=%v" .bodySeconds) -}}
{{- $args = append $args (printf "--max-connections=%d" (int64 .maxConnections)) -}}
{{- append $args (printf "--max-body-bytes=%d" (int64 .maxBodyBytes)) | toRawJson -}}
{{- end -}}

{{/* Arguments, one per line and quoted: what they are is the program's business, not YAML's. */}}
{{- define "kvxfer.arguments" -}}
{{- range $index, $argument := . }}
{{- if $index }}{{ "\n" }}{{ end -}}
- {{ $argument | toString | quote }}
{{- end }}
{{- end -}}
