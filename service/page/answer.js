// One stream of answers: reads it into its messages, through lost connections too, and measures them.

import { ApiError } from "./api.js";
import { takeCalls } from "./calls.js";
import { pickUpStream, startStream } from "./stream.js";

const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 5000;
const PATIENCE_MS = 90_000; // the server keeps a stream that nobody reads for less
const GONE = "The server no longer has this answer.";
const UNSENT = "The page was left before this was sent.";

/** Why a signal is aborted when the page goes away: the answer goes on without it. */
export const LEFT = new DOMException("The page was left.", "AbortError");

/**
 * Reads the answers to `request` {path, body}, or without one what is still to come of them, and calls changed(message)
 * after every change. All are of one stream, samples of one question if they are several. Sets each message's final
 * status, stats and error. A 401 is thrown: it asks for a key, not for a message.
 */
export async function readAnswers(messages, request, signal, changed) {
  const [{ stream }] = messages;
  const unfinished = () => messages.filter(({ status }) => status === "streaming");
  const setAll = (fields) => unfinished().forEach((message) => Object.assign(message, fields));
  for (const message of messages) message.times ??= { sent: Date.now() };
  let picking = request === null;
  let lostAt = 0;
  for (let delay = FIRST_DELAY_MS; ; delay = Math.min(delay * 2, MAX_DELAY_MS)) {
    try {
      const begun = (requestId) => setAll({ request: requestId });
      const events = picking
        ? pickUpStream(stream, lastOf(messages), signal)
        : startStream(request.path, request.body, stream, signal, begun);
      for await (const event of events) {
        for (const message of messages) delete message.lost;
        lostAt = 0;
        delay = FIRST_DELAY_MS;
        const message = messages.length === 1 ? messages[0] : messages.find(({ choice = 0 }) => choice === event.choice);
        if (!message) continue;
        take(message, event);
        // Of several, each has its usage with its last event; of one it follows.
        if (messages.length > 1 && event.finishReason) complete(message);
        if (!event.done) changed(message);
      }
      unfinished().forEach(complete);
      break;
    } catch (error) {
      if (signal.aborted) {
        if (signal.reason === LEFT) return;
        setAll({ status: "stopped" });
        break;
      }
      if (!(error instanceof ApiError)) throw error;
      lostAt ||= Date.now();
      if (!isLost(error, picking) || Date.now() - lostAt > PATIENCE_MS) {
        for (const message of unfinished()) fail(message, error, picking);
        break;
      }
      picking = true;
      setAll({ lost: true });
      messages.forEach(changed);
      await pause(delay, signal);
    }
  }
  for (const message of messages) {
    delete message.lost;
    delete message.queued;
  }
  messages.forEach(changed);
}

/** The event that came last of the stream; undefined if none did. */
function lastOf(messages) {
  const seen = messages.map(({ at }) => at).filter(Boolean);
  return seen.sort((a, b) => a.localeCompare(b, "en", { numeric: true })).at(-1);
}

function take(message, event) {
  const now = Date.now();
  if (event.id) message.at = event.id;
  if (event.text || event.reasoning || event.calls) {
    message.times.first ??= now;
    message.times.last = now;
    if (event.reasoning) message.reasoning = (message.reasoning ?? "") + event.reasoning;
    if (event.calls) takeCalls((message.calls ??= []), event.calls);
    message.content += event.text;
  }
  if (event.finishReason) message.finishReason = event.finishReason;
  message.stats = measured(message, event.usage);
}

function complete(message) {
  message.status = message.finishReason === "length" ? "length" : "done";
}

/** Times in ms. The rate counts the tokens after the first over the time after the first. */
function measured({ times, at, stats = {} }, usage) {
  const measures = { ...stats };
  if (times.first !== undefined) measures.firstTokenMs = times.first - times.sent;
  if (usage) {
    measures.promptTokens = usage.prompt_tokens;
    measures.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
    measures.completionTokens = usage.completion_tokens;
  } else if (at !== undefined && measures.promptTokens === undefined) {
    measures.completionTokens = Number.parseInt(at, 10); // an event's id is the number of tokens until then
  }
  const span = times.last - times.first;
  if (span > 0 && measures.completionTokens > 1) {
    measures.tokensPerSecond = ((measures.completionTokens - 1) * 1000) / span;
  }
  return measures;
}

function isLost({ status, code }, picking) {
  return code === "connection_lost" || (picking && (code === "unreachable" || status === 503));
}

function fail(message, error, picking) {
  if (error.status === 401) throw error;
  if (error.code === "stream_taken_over") return; // another tab reads it now, and writes what comes
  if (error.code === "stream_stopped") {
    message.status = "stopped";
    return;
  }
  const gone = picking && (error.status === 404 || error.status === 410);
  if (message.content !== "" && (gone || isLost(error, picking))) {
    message.status = "cut";
  } else {
    message.status = "error";
    message.error = {
      message: gone ? (message.queued ? UNSENT : GONE) : error.message,
      status: error.status,
      code: error.code,
    };
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
