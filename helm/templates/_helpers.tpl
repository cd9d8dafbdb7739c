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

{{/* Strictly more than the pod needs to go in order. */}}
{{- define "quire.gracePeriod" -}}
{{- add .Values.drain.preStopSeconds .Values.drain.shutdownTimeoutSeconds .Values.drain.marginSeconds -}}
{{- end -}}

{{- define "quire.autoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}true{{- end -}}
{{- end -}}

{{/* A folder that was put on the claim of the model cache: the router reads its tokenizer there. */}}
{{- define "quire.modelIsInCache" -}}
{{- if hasPrefix "/cache/" .Values.model.name -}}true{{- end -}}
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

{{/* What pods start anew for when it changes. */}}
{{- define "quire.checksum" -}}
{{- $secrets := list .Values.huggingFace.token .Values.redis.external.url -}}
{{- if and .Values.auth.enabled (not .Values.auth.existingSecret) -}}
{{- $secrets = append $secrets (include "quire.apiKey" .) -}}
{{- end -}}
{{- if or .Values.redis.enabled .Values.redis.external.url -}}
{{- $secrets = append $secrets (include "quire.cacheSeed" .) -}}
{{- end -}}
checksum/secrets: {{ append $secrets (include "quire.registryChecksum" .) | join "," | sha256sum }}
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

{{- define "quire.registryChecksum" -}}
{{- if .Values.redis.enabled -}}
{{- $secret := include "quire.registrySecret" . -}}
{{- range list "replica-password" "router-password" -}}
{{- include "quire.password" (dict "context" $ "secret" $secret "key" .) | sha256sum -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "named" value's name "list" variables): what containers have already, or get as flags, would be ignored. */}}
{{- define "quire.checkEnvironment" -}}
{{- $seen := list "HOME" "HF_HOME" "HF_TOKEN" "TRITON_CACHE_DIR" "POD_IP" -}}
{{- range .list -}}
{{- if hasPrefix "QUIRE_" .name -}}
{{- fail (printf "%s: %s is one of quire's flags; set the value that the chart has for it" $.named .name) -}}
{{- end -}}
{{- if has .name $seen -}}
{{- fail (printf "%s: %s is set already, by the chart or above; leave it out" $.named .name) -}}
{{- end -}}
{{- $seen = append $seen .name -}}
{{- end -}}
{{- end -}}

{{/* Combinations that would be accepted and then not work. */}}
{{- define "quire.check" -}}
{{- $v := .Values -}}
{{- include "quire.checkEnvironment" (dict "named" "extraEnv" "list" $v.extraEnv) -}}
{{- include "quire.checkEnvironment" (dict "named" "router.extraEnv" "list" $v.router.extraEnv) -}}
{{- if and $v.autoscaling.hpa.enabled $v.autoscaling.keda.enabled -}}
{{- fail "autoscaling: enable either hpa or keda; KEDA makes an HPA of its own" -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling: minReplicas (%d) is more than maxReplicas (%d)" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $v.router.enabled (eq $v.router.discovery "registry") (not (include "quire.registry" .)) -}}
{{- fail "router: it finds replicas in the registry; set redis.enabled, redis.external.url or redis.external.existingSecret, or router.discovery to dns" -}}
{{- end -}}
{{- if and $v.redis.enabled (or $v.redis.external.url $v.redis.external.existingSecret) -}}
{{- fail "redis: either redis.enabled or redis.external, not both" -}}
{{- end -}}
{{- if and $v.redis.external.url $v.redis.external.existingSecret -}}
{{- fail "redis.external: either url or existingSecret, not both" -}}
{{- end -}}
{{- if $v.redis.external.caSecret -}}
{{- if not (or $v.redis.external.url $v.redis.external.existingSecret) -}}
{{- fail "redis.external: caSecret is for a rediss:// server of your own; set redis.external.url or redis.external.existingSecret, too" -}}
{{- end -}}
{{- if hasPrefix "redis://" $v.redis.external.url -}}
{{- fail "redis.external: a redis:// url shows no certificate that caSecret could verify; make it rediss://" -}}
{{- end -}}
{{- if contains "ssl_ca_certs=" $v.redis.external.url -}}
{{- fail "redis.external: either caSecret or ssl_ca_certs in the url, not both" -}}
{{- end -}}
{{- end -}}
{{- if and $v.auth.existingSecret $v.auth.apiKey -}}
{{- fail "auth: either apiKey or existingSecret, not both" -}}
{{- end -}}
{{- if and $v.huggingFace.existingSecret $v.huggingFace.token -}}
{{- fail "huggingFace: either token or existingSecret, not both" -}}
{{- end -}}
{{- $several := or (include "quire.autoscaled" .) (gt (int $v.replicaCount) 1) -}}
{{- if and $several $v.modelCache.persistent (hasPrefix "ReadWriteOnce" $v.modelCache.accessMode) -}}
{{- fail "modelCache: several replicas share the claim; set modelCache.accessMode to ReadWriteMany, or modelCache.persistent to false" -}}
{{- end -}}
{{- if and (include "quire.modelIsInCache" .) (not $v.modelCache.persistent) -}}
{{- fail (printf "model: %s is in the model cache, which is empty at first; set modelCache.persistent" $v.model.name) -}}
{{- end -}}
{{- if and (include "quire.modelIsInCache" .) $v.router.enabled (hasPrefix "ReadWriteOnce" $v.modelCache.accessMode) -}}
{{- fail (printf "modelCache: the router reads the tokenizer of %s from the claim, too; set modelCache.accessMode to ReadWriteMany" $v.model.name) -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.redis.external.url -}}
{{- $port := regexFind ":[0-9]+$" (urlParse $v.redis.external.url).host | trimPrefix ":" | default "6379" -}}
{{- if ne (int $port) (int $v.redis.external.port) -}}
{{- fail (printf "redis.external: the url's port is %s, and the network policy lets through port %d only; set redis.external.port" $port (int $v.redis.external.port)) -}}
{{- end -}}
{{- end -}}
{{- if and (include "quire.registry" .) (not $v.engine.enablePrefixCaching) -}}
{{- fail "engine: enablePrefixCaching must be on with a registry, which tells of that cache" -}}
{{- end -}}
{{- if and (eq $v.engine.device "cpu") $v.gpu.enabled -}}
{{- fail "engine: device cpu would hold a GPU without using it; set gpu.enabled to false" -}}
{{- end -}}
{{- if and (eq $v.engine.preemptionMode "swap") (eq (float64 $v.engine.swapSpace) 0.0) -}}
{{- fail "engine: preemptionMode swap needs swapSpace" -}}
{{- end -}}
{{- if not (or (kindIs "invalid" $v.podDisruptionBudget.minAvailable) (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable)) -}}
{{- fail "podDisruptionBudget: either minAvailable or maxUnavailable, not both" -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled -}}
{{- fail "metrics: enable either serviceMonitor or podMonitor, or everything is scraped twice" -}}
{{- end -}}
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

{{- define "quire.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: {{ .scaleUpStabilizationSeconds }}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownStabilizationSeconds }}
  policies:
    - { type: Pods, value: {{ .scaleDownPodsPerMinute }}, periodSeconds: 60 }
{{- end -}}
