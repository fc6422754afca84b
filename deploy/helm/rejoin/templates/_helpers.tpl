{{/* What does not change when the job is upgraded. */}}
{{- define "rejoin.selected" -}}
app.kubernetes.io/name: rejoin
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "rejoin.labels" -}}
{{ include "rejoin.selected" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* The addresses of all coordinators. */}}
{{- define "rejoin.coordinators" -}}
{{- $job := .Release.Name -}}
{{- range $i := until (int .Values.coordinator.count) }}{{ if $i }},{{ end }}{{ $job }}-coordinator-{{ $i }}.{{ $job }}-coordinator:7000{{ end }}
{{- end }}

{{/* What a container may do: nothing that a process of its user may not. */}}
{{- define "rejoin.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
