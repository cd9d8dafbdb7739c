{{- define "quire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "quire.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component: (dict "context" $ "component" "replica") */}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ default .context.Chart.Name .context.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .context.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .context.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .context.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .context.Chart.Name .context.Chart.Version }}
{{- end -}}

{{- define "quire.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* The name by which requests call the model, as the server itself finds it. */}}
{{- define "quire.servedName" -}}
{{- if .Values.model.servedNames -}}
{{- first .Values.model.servedNames -}}
{{- else -}}
{{- $name := default .Values.model.name .Values.model.lora -}}
{{- $own := regexReplaceAll "(-[0-9]{5}-of-[0-9]{5})?\\.gguf$" (base $name) "" -}}
{{- hasPrefix "/" $name | ternary $own $name | default "quire-demo" -}}
{{- end -}}
{{- end -}}

{{/* Where a pod may run: of .Values, for replicas, or of another component's part of them. */}}
{{- define "quire.placement" -}}
{{- range $field, $value := pick . "priorityClassName" "nodeSelector" "tolerations" "affinity" -}}
{{- with $value }}
{{ dict $field . | toYaml }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What a pod with so many GPUs asks for: (dict "resources" quantities for each of them "count" of GPUs) */}}
{{- define "quire.forEachGpu" -}}
{{- $times := max 1 (int .count) -}}
{{- range $name, $quantity := .resources }}
{{- $text := kindIs "string" $quantity | ternary $quantity (int64 $quantity | toString) }}
{{- $number := regexFind "^[0-9.]+" $text }}
{{ $name }}: {{ printf "%v%s" (contains "." $number | ternary (mulf $number $times) (mul $number $times)) (trimPrefix $number $text) | quote }}
{{- end }}
{{- end -}}

{{/* Strictly more than the pod needs to go in order. */}}
{{- define "quire.gracePeriod" -}}
{{- add .Values.drain.preStopSeconds .Values.drain.shutdownTimeoutSeconds .Values.drain.marginSeconds -}}
{{- end -}}

{{- define "quire.autoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}true{{- end -}}
{{- end -}}

{{/* Folders of the model that were put on the claim of the model cache: the router reads the tokenizer there. */}}
{{- define "quire.modelIsInCache" -}}
{{- $held := list -}}
{{- range list .Values.model.name .Values.model.lora -}}
{{- if hasPrefix "/cache/" . -}}{{- $held = append $held . -}}{{- end -}}
{{- end -}}
{{- join " and " $held -}}
{{- end -}}

{{/* Whether any of the model's files come from the Hub, and are kept in the cache. */}}
{{- define "quire.downloads" -}}
{{- range list .Values.model.name .Values.model.lora -}}
{{- if and . (not (hasPrefix "/" .)) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.modelClaim" -}}
{{- default (printf "%s-model-cache" (include "quire.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{- define "quire.registry" -}}
{{- if or .Values.redis.enabled .Values.redis.external.url .Values.redis.external.existingSecret -}}true{{- end -}}
{{- end -}}

{{- define "quire.authSecret" -}}
{{- default (printf "%s-api-key" (include "quire.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{- define "quire.registrySecret" -}}
{{- default (printf "%s-registry" (include "quire.fullname" .)) .Values.redis.external.existingSecret -}}
{{- end -}}

{{/*
A password: the one that the cluster has, else a new one. Made once a render, so that everything that
mentions it agrees: (dict "context" $ "secret" name "key" key)
*/}}
{{- define "quire.password" -}}
{{- $made := default dict (get .context.Values "madePasswords") -}}
{{- $id := printf "%s/%s" .secret .key -}}
{{- if not (hasKey $made $id) -}}
{{- $found := lookup "v1" "Secret" .context.Release.Namespace .secret | default dict -}}
{{- $data := get $found "data" | default dict -}}
{{- $_ := set $made $id (hasKey $data .key | ternary (get $data .key | b64dec) (randAlphaNum 40)) -}}
{{- $_ := set .context.Values "madePasswords" $made -}}
{{- end -}}
{{- get $made $id -}}
{{- end -}}

{{- define "quire.authEnv" -}}
{{- if .Values.auth.enabled }}
- name: QUIRE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "quire.authSecret" . }}
      key: {{ empty .Values.auth.existingSecret | ternary "api-key" .Values.auth.existingSecretKey }}
{{- end }}
{{- end -}}

{{/* The flag of the Secret with named keys, its mount and its volume: the kubelet keeps the file up to date. */}}
{{- define "quire.namedKeysArg" -}}
{{- if .Values.auth.namedKeys.existingSecret -}}
- --api-key-file=/keys/keys
{{- end -}}
{{- end -}}

{{- define "quire.namedKeysMount" -}}
{{- if .Values.auth.namedKeys.existingSecret -}}
- { name: keys, mountPath: /keys, readOnly: true }
{{- end -}}
{{- end -}}

{{- define "quire.namedKeysVolume" -}}
{{- with .Values.auth.namedKeys -}}
{{- if .existingSecret -}}
- name: keys
  secret:
    secretName: {{ .existingSecret }}
    items:
      - { key: {{ .existingSecretKey | quote }}, path: keys }
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.apiKey" -}}
{{- default (include "quire.password" (dict "context" . "secret" (include "quire.authSecret" .) "key" "api-key")) .Values.auth.apiKey -}}
{{- end -}}

{{- define "quire.hubEnv" -}}
{{- if or .Values.huggingFace.token .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-hugging-face" (include "quire.fullname" .)) .Values.huggingFace.existingSecret }}
      key: {{ empty .Values.huggingFace.existingSecret | ternary "token" .Values.huggingFace.existingSecretKey }}
{{- end }}
{{- end -}}

{{/*
What pods start anew for when it changes: secrets that values give. Those that the chart makes differ at every render
without a cluster, which must restart nothing.
*/}}
{{- define "quire.checksum" -}}
checksum/secrets: {{ list .Values.auth.apiKey .Values.huggingFace.token .Values.redis.external.url | toJson | sha256sum }}
{{- end -}}

{{/* What digests are seeded with, so that nobody can tell from them what a prompt was. */}}
{{- define "quire.cacheSeed" -}}
{{- include "quire.password" (dict "context" . "secret" (include "quire.registrySecret" .) "key" "cache-seed") -}}
{{- end -}}

{{/* The outer Redis' URL, with the CA that its certificate must be of. */}}
{{- define "quire.externalUrl" -}}
{{- $external := .Values.redis.external -}}
{{- $external.url -}}
{{- if $external.caSecret -}}
{{- contains "?" $external.url | ternary "&" "?" -}}ssl_ca_certs=/redis-ca/ca.crt
{{- end -}}
{{- end -}}

{{- define "quire.registryMount" -}}
{{- if .Values.redis.external.caSecret }}
- { name: redis-ca, mountPath: /redis-ca, readOnly: true }
{{- end }}
{{- end -}}

{{- define "quire.registryVolume" -}}
{{- if .Values.redis.external.caSecret }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.external.caSecret }}
    items:
      - { key: {{ .Values.redis.external.caSecretKey | quote }}, path: ca.crt }
{{- end }}
{{- end -}}

{{/* (dict "context" $ "url" key of the URL) */}}
{{- define "quire.registryEnv" -}}
- name: QUIRE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "quire.registrySecret" .context }}
      key: {{ .url }}
- name: QUIRE_CACHE_SEED
  valueFrom:
    secretKeyRef:
      name: {{ include "quire.registrySecret" .context }}
      key: cache-seed
{{- end -}}

{{/*
A replica may change what is Quire's; the router may only read it; nobody may empty or reconfigure the server:
(dict "replica" password "router" password)
*/}}
{{- define "quire.acl" -}}
user default reset off
user replica reset on #{{ sha256sum .replica }} ~quire:* +@all -@admin -@dangerous
user router reset on #{{ sha256sum .router }} %R~quire:* +@connection +@read +eval_ro +evalsha_ro +time +script|load
{{- end -}}

{{- define "quire.egressToNames" -}}
- ports:
    - { port: 53, protocol: UDP }
    - { port: 53, protocol: TCP }
{{- end -}}

{{- define "quire.egressToRedis" -}}
{{- if .Values.redis.enabled }}
- to:
    - podSelector:
        matchLabels: {{- include "quire.selector" (dict "context" . "component" "redis") | nindent 10 }}
  ports:
    - { port: 6379 }
{{- else if include "quire.registry" . }}
- ports:
    - { port: {{ .Values.redis.external.port }} }
{{- end }}
{{- end -}}

{{- define "quire.ingressOfClients" -}}
{{- if .Values.networkPolicy.clients -}}
- from:
    {{- toYaml .Values.networkPolicy.clients | nindent 4 }}
    - podSelector: # the chart's test
        matchLabels: {{- include "quire.selector" (dict "context" . "component" "test") | nindent 10 }}
    {{- with .Values.networkPolicy.scrapers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - { port: 8000 }
{{- else -}}
- ports:
    - { port: 8000 }
{{- end -}}
{{- end -}}

{{/* Why a part of .Values.metrics is not made, if it is not: (dict "context" $ "name" its name) */}}
{{- define "quire.leftOut" -}}
{{- $enabled := (get .context.Values.metrics .name).enabled | toString -}}
{{- if eq $enabled "false" -}}
metrics.{{ .name }}.enabled is false
{{- else if and (eq .name "serviceMonitor") .context.Values.metrics.podMonitor.enabled -}}
there is a PodMonitor instead
{{- else if and (eq $enabled "auto") (not (.context.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
the cluster has no API monitoring.coreos.com/v1; `helm upgrade` makes it once prometheus-operator is there
{{- end -}}
{{- end -}}

{{- define "quire.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: {{ .scaleUpStabilizationSeconds }}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownStabilizationSeconds }}
  policies:
    - { type: Pods, value: {{ .scaleDownPodsPerMinute }}, periodSeconds: 60 }
{{- end -}}
