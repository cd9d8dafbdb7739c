// One answer: asks the model, grows the message as text comes, and measures it.

import { ApiError, streamChat } from "./api.js";

/**
 * Streams the answer to `body` into `message`, calling changed() after every change. Sets the message's final
 * status, stats and error. A 401 is thrown: it asks for a key, not for a message.
 */
export async function streamAnswer(message, body, signal, changed) {
  const started = performance.now();
  let firstText = 0;
  let lastText = 0;
  let finishReason = null;
  let usage = null;
  try {
    for await (const event of streamChat(body, signal)) {
      if (event.text) {
        lastText = performance.now();
        firstText ||= lastText;
        message.content += event.text;
        message.stats = measure(started, firstText, lastText, null);
      }
      finishReason = event.finishReason ?? finishReason;
      usage = event.usage ?? usage;
      changed();
    }
    message.finishReason = finishReason;
    message.status = finishReason === "length" ? "length" : "done";
  } catch (error) {
    if (signal.aborted) {
      message.status = "stopped";
    } else if (error instanceof ApiError) {
      if (error.status === 401) throw error;
      message.status = "error";
      message.error = { message: error.message, status: error.status, code: error.code };
    } else {
      throw error;
    }
  }
  message.stats = measure(started, firstText, lastText, usage);
  changed();
}

/** Times in ms. The rate counts the tokens after the first over the time after the first. */
function measure(started, firstText, lastText, usage) {
  const stats = {};
  if (firstText > 0) stats.firstTokenMs = firstText - started;
  if (usage) {
    stats.promptTokens = usage.prompt_tokens;
    stats.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
    stats.completionTokens = usage.completion_tokens;
    const span = lastText - firstText;
    if (span > 0 && usage.completion_tokens > 1) {
      stats.tokensPerSecond = ((usage.completion_tokens - 1) * 1000) / span;
    }
  }
  return stats;
}
