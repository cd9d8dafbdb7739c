// Server-sent events (HTML standard, 9.2.6) from text that arrives cut anywhere.

const END_WITHIN_MS = 500;

export class EventParser {
  #line = "";
  #afterReturn = false;
  #data = [];
  #event = "";
  #id = ""; // of the latest event that has one

  /** Takes the next piece of text and returns the events that it completes: [{event, data, id}]. */
  push(text) {
    if (text === "") return [];
    // A "\r\n" cut in two must not count as two line ends.
    if (this.#afterReturn && text[0] === "\n") text = text.slice(1);
    this.#afterReturn = text === "" ? false : text.endsWith("\r");

    const lines = (this.#line + text).split(/\r\n|\n|\r/);
    this.#line = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line !== "") {
        this.#field(line);
      } else if (this.#data.length > 0) {
        events.push({ event: this.#event || "message", data: this.#data.join("\n"), id: this.#id });
        this.#data = [];
        this.#event = "";
      } else {
        this.#event = "";
      }
    }
    return events;
  }

  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id") this.#id = value;
  }
}

/** The events of a response body. Leaving the loop early cancels the body, and with it the request, unless it ends soon. */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return; // an event without its blank line is incomplete and is dropped
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    leave(reader);
  }
}

/** Reads on without an eye on it: what is cancelled right before its end is a failed request to the browser. */
async function leave(reader) {
  const cancel = () => reader.cancel().catch(() => {});
  const timer = setTimeout(cancel, END_WITHIN_MS);
  try {
    while (!(await reader.read()).done);
  } catch {
    // It broke, or was aborted: then it has ended, too.
  }
  clearTimeout(timer);
}
