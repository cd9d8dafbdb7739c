// The stream of what changes among the blocks, and bytes as arrays.

import { ApiError, request } from "../api.js";
import { readEvents } from "../sse.js";

export const STATES = ["free", "active", "cached", "computing", "transfer", "pinned"];

/** The bytes that base64 text stands for. */
export function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

export const int32Of = (text) => new Int32Array(bytesOf(text).buffer);
const float32Of = (text) => new Float32Array(bytesOf(text).buffer);

/** An update with arrays in place of text. */
export function decodeUpdate(event) {
  return {
    ...event,
    places: int32Of(event.places),
    states: bytesOf(event.states),
    references: bytesOf(event.references),
    ages: float32Of(event.ages),
    tables: event.tables.map((table) => ({
      ...table,
      blocks: int32Of(table.blocks),
      host_blocks: int32Of(table.host_blocks),
    })),
    moves: event.moves.map(([step, at, kind, block, other, request, effects]) => ({ step, at, kind, block, other, request, effects })),
  };
}

/**
 * Events of /v1/blocks/events as they come; `query` is "detail=counts", or "past=true" for a map with what was before.
 * Throws an ApiError when they end.
 */
export async function* blockEvents(query, signal) {
  const lost = new AbortController();
  const offline = () => lost.abort(new ApiError("The network is gone."));
  window.addEventListener("offline", offline); // a stream that is silent would not notice
  try {
    const either = AbortSignal.any([signal, lost.signal]);
    const response = await request(`/v1/blocks/events?${query}`, { signal: either, priority: "low" });
    for await (const { data } of readEvents(response.body)) {
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, { status: 503, code: event.error.code });
      yield event;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection broke off.");
  } finally {
    window.removeEventListener("offline", offline);
  }
  throw new ApiError("The connection was closed.");
}
