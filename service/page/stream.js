// Answers as the server streams them, which can be picked up again after a reload or a lost connection.
//
// An event is {id, choice?, text?, reasoning?, calls?, finishReason?, usage?, done?}, with the id after which to pick the
// stream up. What is of no choice is of the whole stream.

import { ApiError, eventsOf, request } from "./api.js";

const TRY_AGAIN_MS = [250, 1000, 4000];

/** An id that nobody can guess. */
export function newStreamId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Starts a stream. `begun(requestId)` is called once the server has taken the request. */
export async function* startStream(path, body, streamId, signal, begun) {
  const usage = { include_usage: true, ...(body.n > 1 && { continuous_usage_stats: true }) }; // of each choice
  const streamed = { body: { ...body, stream: true, stream_options: usage }, signal, priority: "low" };
  let response;
  try {
    response = await request(path, { ...streamed, headers: { "X-Stream-Id": streamId } });
  } catch (error) {
    if (error.code !== "too_many_streams") throw error;
    response = await request(path, streamed); // it cannot be picked up, but it is an answer
  }
  begun(response.headers.get("X-Request-Id"));
  yield* chunks(response);
}

/** What follows the event `last` of a stream; all of it without one. Nothing follows a stream's end. */
export async function* pickUpStream(streamId, last, signal) {
  const headers = last === undefined ? {} : { "Last-Event-ID": last };
  const response = await request(`/v1/streams/${streamId}`, { headers, signal, priority: "low" });
  if (response.status !== 204) yield* chunks(response);
}

/** Ends a stream, whoever reads it. One that is not there may still be on its way to the server, or has ended. */
export async function stopStream(streamId) {
  for (const wait of [0, ...TRY_AGAIN_MS]) {
    if (wait > 0) await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      await request(`/v1/streams/${streamId}`, { method: "DELETE", keepalive: true });
      return;
    } catch (error) {
      if (error.status !== 404) return; // then it ends by itself, since nobody reads it
    }
  }
}

async function* chunks(response) {
  for await (const { data, id } of eventsOf(response)) {
    if (data === "[DONE]") {
      yield { id, done: true };
      return;
    }
    const { error, choices, usage } = JSON.parse(data);
    if (error) throw new ApiError(error.message, { code: error.code ?? error.type ?? null });
    const { index: choice, delta = {}, text, finish_reason: finishReason } = choices?.[0] ?? {};
    yield {
      id,
      choice,
      text: text ?? delta.content ?? "",
      reasoning: delta.reasoning ?? delta.reasoning_content ?? "",
      calls: delta.tool_calls,
      finishReason,
      usage,
    };
  }
  throw new ApiError("The connection closed before the answer was complete.", { code: "connection_lost" });
}
