{{/* Labels of an object. Call with (dict "root" $ "component" "operator"). */}}
{{- define "muster.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{ include "muster.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* What never changes over a release's life: selectors are immutable. */}}
{{- define "muster.selector" -}}
app.kubernetes.io/name: muster
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Variables by which operator and API reach S3; the operator hands them to the workers. */}}
{{- define "muster.s3" -}}
{{- $s3 := .Values.s3 }}
{{- range $name, $value := dict "ENDPOINT" $s3.endpoint "REGION" $s3.region "ADDRESSING" $s3.addressing "KMS_KEY_ID" $s3.kmsKeyId "ROLE_ARN" $s3.roleArn "RETRY_SECONDS" $s3.retrySeconds }}
{{- with $value }}
- {name: MUSTER_S3_{{ $name }}, value: {{ . | toString | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* registry/repository@digest or :tag. Call with (dict "root" $ "image" .Values.operator.image). */}}
{{- define "muster.image" -}}
{{- with .root.Values.global.imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "muster.pullSecrets" -}}
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The restricted Pod Security Standard, and nothing that can be written but mounted volumes. */}}
{{- define "muster.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The claim that the API's SQLite file lies in; nothing where a database is given, or where it may be forgotten. */}}
{{- define "muster.apiClaim" -}}
{{- with .Values.api }}
{{- if and .persistence.enabled (not .database.existingSecret) }}{{ .persistence.existingClaim | default "muster-api" }}{{ end -}}
{{- end }}
{{- end }}

{{/* What uploads on their way lie in: a claim, the pod's own disk, or nothing where the API's own claim holds them. */}}
{{- define "muster.uploads" -}}
{{- if and .Values.workers.filesUri .Values.api.uploads.existingClaim -}}
persistentVolumeClaim: {claimName: {{ .Values.api.uploads.existingClaim }}}
{{- else if and .Values.workers.filesUri (not (include "muster.apiClaim" .)) -}}
emptyDir: {sizeLimit: {{ .Values.api.uploads.size }}}
{{- end }}
{{- end }}

{{/* What would otherwise end in a pod that never starts is refused here, with what to do. */}}
{{- define "muster.judgeApi" -}}
{{- $api := .Values.api }}
{{- if $api.database.existingSecret }}
{{- if not $api.bootstrapToken.existingSecret }}
{{- fail "api.bootstrapToken.existingSecret: with a database the API keeps no volume to write its first token to; name a Secret that holds one (docs/install.md)" }}
{{- end }}
{{- if and (gt (int $api.replicas) 1) .Values.workers.filesUri (not $api.uploads.existingClaim) (not $api.uploads.sticky) }}
{{- fail "api.uploads: an upload lies on the disk of the replica that it began at, and another one would not know it; name a ReadWriteMany claim in api.uploads.existingClaim, or set api.uploads.sticky where each client meets one replica (docs/files.md)" }}
{{- end }}
{{- else if gt (int $api.replicas) 1 }}
{{- fail "api.replicas: SQLite has one writer; name a PostgreSQL database in api.database.existingSecret" }}
{{- else if and (eq (include "muster.apiClaim" .) "muster-api") (not $api.persistence.storageClassName) }}
{{- /* lookup finds nothing in `helm template` and Argo CD, where this can't be judged. */}}
{{- if and (lookup "v1" "Namespace" "" "kube-system") (not (lookup "v1" "PersistentVolumeClaim" .Release.Namespace "muster-api")) }}
{{- $default := false }}
{{- range (lookup "storage.k8s.io/v1" "StorageClass" "" "").items }}
{{- if eq (index (.metadata.annotations | default dict) "storageclass.kubernetes.io/is-default-class" | default "") "true" }}{{ $default = true }}{{ end }}
{{- end }}
{{- if not $default }}
{{- fail "api.persistence.storageClassName: the API keeps its history in a volume, and this cluster has no default StorageClass; name one, or a PostgreSQL database in api.database.existingSecret, or set api.enabled=false" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Several operators of one namespace each may live in a cluster, and what they share no namespace for has one name each. */}}
{{- define "muster.nodesRole" -}}
muster-operator-nodes{{ with .Values.operator.watchNamespace }}-{{ . }}{{ end }}
{{- end }}

{{/* "true" where the API server judges the pods that the operator makes (operator-policy.yaml). */}}
{{- define "muster.judgesWorkers" -}}
{{- and (ne (toString .Values.operator.policy) "false") (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) -}}
{{- end }}

{{/* CEL: this namespace may be a job's: it is neither Kubernetes' own nor the release's (muster.api.core.cluster_objects). */}}
{{- define "muster.jobsNamespace" -}}
!request.namespace.matches('^(kube|openshift)-') && request.namespace != '{{ .Release.Namespace }}'
{{- end }}

{{/* CEL: the text is the allowed `each`, or begins as one that ends with * does. */}}
{{- define "muster.listed" -}}
each != "" && (each == {{ . }} || (each.endsWith("*") && {{ . }}.startsWith(each.substring(0, each.size() - 1))))
{{- end }}

{{/* CEL: `each` has all keys of the path. */}}
{{- define "muster.hasPath" -}}
{{- $at := "each" }}
{{- range $index, $key := splitList "." . }}
{{- $at = printf "%s.%s" $at $key }}
{{- if $index }} && {{ end }}has({{ $at }})
{{- end }}
{{- end }}

{{/* Where a volume names a Secret: SECRET_PATHS of muster.api.core.cluster_objects. */}}
{{- define "muster.volumeSecrets" -}}
- secret.secretName
- csi.nodePublishSecretRef.name
- csi.volumeAttributes.secretProviderClass
- azureFile.secretName
- cephfs.secretRef.name
- cinder.secretRef.name
- flexVolume.secretRef.name
- iscsi.secretRef.name
- rbd.secretRef.name
- scaleIO.secretRef.name
- storageos.secretRef.name
{{- end }}
