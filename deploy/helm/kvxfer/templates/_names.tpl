{{/* Names, labels and addresses, each said once. */}}

{{- define "kvxfer.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a Service or a workload finds its pods by: (list $ "component"). */}}
{{- define "kvxfer.selector" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ default $.Chart.Name $.Values.nameOverride }}
app.kubernetes.io/instance: {{ $.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of pods name no version: a new chart alone restarts nothing. */}}
{{- define "kvxfer.podLabels" -}}
{{ include "kvxfer.selector" . }}
app.kubernetes.io/part-of: kvxfer
{{- end -}}

{{- define "kvxfer.labels" -}}
{{- $ := index . 0 -}}
{{ include "kvxfer.podLabels" . }}
app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $.Chart.Name $.Chart.Version }}
{{- end -}}

{{/* metadata of an object: (list $ "component" "name"). */}}
{{- define "kvxfer.metadata" -}}
name: {{ index . 2 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "kvxfer.labels" . | nindent 2 }}
{{- end -}}

{{/* (list $ repository tag) */}}
{{- define "kvxfer.image" -}}
{{- $ := index . 0 -}}
{{- $image := printf "%s:%s" (index . 1) (index . 2 | default $.Values.image.tag | default $.Chart.AppVersion) -}}
{{- if $.Values.image.registry -}}
{{- printf "%s/%s" (trimSuffix "/" $.Values.image.registry) $image -}}
{{- else -}}
{{- $image -}}
{{- end -}}
{{- end -}}

{{- define "kvxfer.secretName" -}}
{{- .Values.auth.existingSecret | default (include "kvxfer.fullname" .) -}}
{{- end -}}

{{- define "kvxfer.tlsSecretName" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "kvxfer.fullname" .)) -}}
{{- end -}}

{{- define "kvxfer.scheme" -}}
{{- ternary "https" "http" .Values.tls.enabled -}}
{{- end -}}

{{- define "kvxfer.controlPlaneUrl" -}}
{{- if .Values.controlPlane.enabled -}}
{{- printf "%s://%s:%v" (include "kvxfer.scheme" .) (include "kvxfer.fullname" .) .Values.controlPlane.port -}}
{{- else -}}
{{- .Values.controlPlane.externalUrl | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* What the workers of a role are: the common settings, and over them its own. (list $ "prefill"), as JSON. */}}
{{- define "kvxfer.pool" -}}
{{- $workers := (index . 0).Values.workers -}}
{{- include "kvxfer.over" (list (omit $workers "prefill" "decode") (index $workers (index . 1))) -}}
{{- end -}}

{{- define "kvxfer.over" -}}
{{- $result := deepCopy (index . 0) -}}
{{- range $name, $value := index . 1 -}}
{{- $below := index $result $name -}}
{{- if and (kindIs "map" $value) (kindIs "map" $below) -}}
{{- $value = include "kvxfer.over" (list $below $value) | fromJson -}}
{{- end -}}
{{- $_ := set $result $name $value -}}
{{- end -}}
{{- $result | toRawJson -}}
{{- end -}}
