{{/* (dict "named" value's name "list" variables): what containers have already, or get as flags, would be ignored. */}}
{{- define "quire.checkEnvironment" -}}
{{- $seen := list "HOME" "HF_HOME" "TRITON_CACHE_DIR" "POD_IP" -}}
{{- range .list -}}
{{- if hasPrefix "QUIRE_" .name -}}
{{- fail (printf "%s: %s is one of quire's flags; set the value that the chart has for it" $.named .name) -}}
{{- end -}}
{{- if eq .name "HF_TOKEN" -}}
{{- fail (printf "%s: replicas and router get HF_TOKEN of huggingFace.token or huggingFace.existingSecret; set one of these" $.named) -}}
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
{{- range $named, $labels := dict "podLabels" $v.podLabels "router.podLabels" $v.router.podLabels -}}
{{- range list "name" "instance" "component" -}}
{{- if hasKey $labels (printf "app.kubernetes.io/%s" .) -}}
{{- fail (printf "%s: Services find the pods by app.kubernetes.io/%s, which the chart sets; leave it out" $named .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
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
{{- if and (eq $v.engine.responseStore "redis") (not (include "quire.registry" .)) -}}
{{- fail "engine: responseStore is redis; set redis.enabled, redis.external.url or redis.external.existingSecret, or leave it at memory" -}}
{{- end -}}
{{- if and $v.router.allowReplicas (ne $v.router.discovery "registry") -}}
{{- fail "router: allowReplicas is for replicas that the registry names; leave it out, or set router.discovery to registry" -}}
{{- end -}}
{{- if and $v.gateway.enabled $v.router.enabled -}}
{{- fail "gateway: it and router both choose replicas; enable one of them" -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.name) -}}
{{- fail "gateway: name must be that of a Gateway, which the route is attached to" -}}
{{- end -}}
{{- if and $v.engine.kvEvents.enabled (not $v.engine.enablePrefixCaching) -}}
{{- fail "engine: enablePrefixCaching must be on with kvEvents, which tell of that cache" -}}
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
{{- if and (not $v.auth.enabled) (or $v.auth.apiKey $v.auth.existingSecret $v.auth.namedKeys.existingSecret) -}}
{{- fail "auth: a key is set, and enabled is false, which lets everyone in; set auth.enabled to true, or leave the key out" -}}
{{- end -}}
{{- if and $v.huggingFace.existingSecret $v.huggingFace.token -}}
{{- fail "huggingFace: either token or existingSecret, not both" -}}
{{- end -}}
{{- if and $v.modelCache.existingClaim (not $v.modelCache.persistent) -}}
{{- fail "modelCache: persistent false is an emptyDir, not existingClaim; set modelCache.persistent to true, or leave the claim out" -}}
{{- end -}}
{{- if and $v.modelCache.storageClass (or $v.modelCache.existingClaim (not $v.modelCache.persistent)) -}}
{{- fail "modelCache: storageClass is for a claim that the chart makes; leave it out, or existingClaim, with modelCache.persistent true" -}}
{{- end -}}
{{- if and $v.serviceAccount.annotations (not $v.serviceAccount.create) -}}
{{- fail "serviceAccount: the chart annotates only an account that it makes; set serviceAccount.create to true, or leave annotations out" -}}
{{- end -}}
{{- $several := or (include "quire.autoscaled" .) (gt (int $v.replicaCount) 1) -}}
{{- if and $several $v.modelCache.persistent (hasPrefix "ReadWriteOnce" $v.modelCache.accessMode) -}}
{{- fail "modelCache: several replicas share the claim; set modelCache.accessMode to ReadWriteMany, or modelCache.persistent to false" -}}
{{- end -}}
{{- if and $v.model.lora (eq $v.engine.loadFormat "dummy") -}}
{{- fail (printf "model: lora (%s) is merged into weights, and engine.loadFormat dummy reads none; leave out one of them" $v.model.lora) -}}
{{- end -}}
{{- if and (include "quire.modelIsInCache" .) (not $v.modelCache.persistent) -}}
{{- fail (printf "model: %s is in the model cache, which is empty at first; set modelCache.persistent" (include "quire.modelIsInCache" .)) -}}
{{- end -}}
{{- if and (include "quire.modelIsInCache" .) $v.router.enabled (hasPrefix "ReadWriteOnce" $v.modelCache.accessMode) -}}
{{- fail (printf "modelCache: the router reads the tokenizer of %s from the claim, too; set modelCache.accessMode to ReadWriteMany" (include "quire.modelIsInCache" .)) -}}
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
{{- if and (eq $v.engine.device "cpu") $v.gpu.count -}}
{{- fail "engine: device cpu would hold a GPU without using it; set gpu.count to 0" -}}
{{- end -}}
{{- $device := $v.runtimeClassName -}}
{{- range $name, $_ := $v.resources.limits -}}{{- if contains "/" $name -}}{{- $device = $name -}}{{- end -}}{{- end -}}
{{- if and (eq $v.engine.device "cuda") (not $v.gpu.count) (not $device) -}}
{{- fail "engine: device cuda needs a GPU in the pod; set gpu.count to 1, or runtimeClassName or resources.limits to what brings one" -}}
{{- end -}}
{{- if and $v.gpu.expertParallel (le (int $v.gpu.count) 1) -}}
{{- fail (printf "gpu: expertParallel divides the experts among several GPUs, and count is %d; set gpu.count to 2 or more, or gpu.expertParallel to false" (int $v.gpu.count)) -}}
{{- end -}}
{{- if and $v.engine.numGpuBlocksOverride $v.engine.kvCacheMemoryBytes -}}
{{- fail "engine: numGpuBlocksOverride and kvCacheMemoryBytes both say how many KV blocks there are; leave one of them out" -}}
{{- end -}}
{{- $sequences := int64 (default 256 $v.engine.maxNumSeqs) -}}{{- /* 256: the default of quire serve */ -}}
{{- if and $v.engine.maxNumBatchedTokens (lt (int64 $v.engine.maxNumBatchedTokens) $sequences) -}}
{{- fail (printf "engine: maxNumBatchedTokens (%d) is less than maxNumSeqs (%d), and every running sequence takes a token each step; set maxNumBatchedTokens to at least that, or maxNumSeqs to less" (int64 $v.engine.maxNumBatchedTokens) $sequences) -}}
{{- end -}}
{{- if and (eq $v.engine.preemptionMode "swap") (eq (float64 $v.engine.swapSpace) 0.0) -}}
{{- fail "engine: preemptionMode swap needs swapSpace" -}}
{{- end -}}
{{- if not (or (kindIs "invalid" $v.podDisruptionBudget.minAvailable) (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable)) -}}
{{- fail "podDisruptionBudget: either minAvailable or maxUnavailable, not both" -}}
{{- end -}}
{{- if and (eq (toString $v.metrics.serviceMonitor.enabled) "true") $v.metrics.podMonitor.enabled -}}
{{- fail "metrics: enable either serviceMonitor or podMonitor, or everything is scraped twice" -}}
{{- end -}}
{{- end -}}
