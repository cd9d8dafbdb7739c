// The server's HTTP API as this page uses it. Every failure is an ApiError with a sentence for the user.

import { keptKey } from "./key.js";
import { followShared } from "./shared.js";
import { readEvents } from "./sse.js";

export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status; // 0: no HTTP answer, or an error inside a stream
    this.code = code;
  }
}

/**
 * The answer to a GET, or with a `body` to a POST. With `keepalive` it outlives the page. A stream has the `priority`
 * "low": where the browser has no connection left, what is short is to get the next one.
 */
export async function request(path, { body, method, headers = {}, signal, keepalive = false, priority = "auto" } = {}) {
  const sent = { ...headers };
  const key = keptKey();
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      keepalive,
      priority,
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", { code: "unreachable" });
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

/** The events of a response: {event, data, id}. A connection that breaks is an ApiError "connection_lost". */
export async function* eventsOf(response) {
  try {
    yield* readEvents(response.body);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.", { code: "connection_lost" });
  }
}

/** [{id, max_model_len?}], never empty. */
export async function listModels() {
  const { data } = await (await request("/v1/models")).json();
  if (!Array.isArray(data) || data.length === 0) throw new ApiError("The server lists no model.");
  return data;
}

/** The token ids of {prompt} or {messages}. */
export async function tokenize(body, signal) {
  return (await (await request("/tokenize", { body, signal })).json()).tokens;
}

/** Whether the model has no chat template: then it continues texts, and does not answer questions. */
export async function onlyContinues(model) {
  try {
    await tokenize({ model, messages: [{ role: "user", content: "?" }] });
    return false;
  } catch (error) {
    if (error.code === "unreachable") throw error;
    return error.code === "no_chat_template"; // a template may want something else of messages
  }
}

/**
 * Calls changed(progress) with start-up phases {phase, done, total, unit, seconds}, the last of them "ready". One window
 * reads them for all; each of the others reads the last one itself.
 */
export function followStartup(changed) {
  const read = async (tell) => {
    const response = await request("/startup");
    for await (const { data } of eventsOf(response)) {
      const progress = JSON.parse(data);
      if (progress.error) throw new ApiError(progress.error.message ?? String(progress.error));
      tell(progress);
    }
  };
  return followShared("quire.startup", null, read, changed);
}
