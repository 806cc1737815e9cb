{{/* Name of everything in the release. */}}
{{- define "kerf.name" -}}
{{- if contains "kerf" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kerf" (.Release.Name | trunc 47 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "kerf.selectorLabels" -}}
app.kubernetes.io/name: kerf
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kerf.labels" -}}
{{ include "kerf.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "kerf.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "kerf.name" .) -}}
{{- end -}}

{{- define "kerf.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* What the operator may do in a namespace: no Secrets, no Pods but to read them. */}}
{{- define "kerf.rules" -}}
- apiGroups: [kerf.dev]
  resources: [modeldeployments]
  verbs: [get, list, watch]
- apiGroups: [kerf.dev]
  resources: [compilecaches]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kerf.dev]
  resources: [modeldeployments/status, compilecaches/status]
  verbs: [patch]
# Owner references that block the owner's foreground deletion need this where admission asks for it.
- apiGroups: [kerf.dev]
  resources: [modeldeployments/finalizers, compilecaches/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
{{- end -}}
