// The server's HTTP API as this page uses it. Every failure is an ApiError with a sentence for the user.

import { readEvents } from "./sse.js";
import { load, save } from "./storage.js";

const KEY = "quire.api-key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status; // 0: no HTTP answer, or an error inside a stream
    this.code = code;
  }
}

/** The key lives as long as the tab. */
export function setApiKey(key) {
  save(KEY, key, "sessionStorage");
}

/** The answer to a GET, or with a `body` to a POST. With `keepalive` it outlives the page. */
export async function request(path, { body, signal, keepalive = false } = {}) {
  const headers = {};
  const key = load(KEY, "", "sessionStorage");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      keepalive,
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    // Not ours: a proxy's page, perhaps.
  }
  const message = error?.message ?? `The server answered ${response.status} ${response.statusText}`.trim();
  return new ApiError(message, { status: response.status, code: error?.code ?? error?.type ?? null });
}

async function* eventsOf(response) {
  try {
    yield* readEvents(response.body);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
}

/** [{id, max_model_len?}], never empty. */
export async function listModels() {
  const { data } = await (await request("/v1/models")).json();
  if (!Array.isArray(data) || data.length === 0) throw new ApiError("The server lists no model.");
  return data;
}

/** Prometheus text. */
export async function fetchMetrics(signal) {
  return (await request("/metrics", { signal })).text();
}

/** Start-up phases {phase, done, total, unit, seconds}, the last of them "ready". */
export async function* watchStartup() {
  const response = await request("/startup");
  for await (const { data } of eventsOf(response)) {
    const progress = JSON.parse(data);
    if (progress.error) throw new ApiError(progress.error.message ?? String(progress.error));
    yield progress;
  }
}

/**
 * A chat completion as it comes: {text} for new text, {finishReason} when the answer ends, {usage} at last.
 * Throws an ApiError for an error status, an error event, or a stream that ends without [DONE].
 */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", {
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
  });
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ApiError(chunk.error.message, { code: chunk.error.code ?? chunk.error.type ?? null });
    }
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { finishReason: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  throw new ApiError("The connection closed before the answer was complete.");
}
