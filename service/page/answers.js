// The answers that this tab reads, of any conversation. One that another tab reads is waited for: if that tab goes away
// before the answer is complete, this one reads on.

import { LEFT, readAnswers } from "./answer.js";
import { askForKey } from "./keyprompt.js";
import { lines } from "./lines.js";
import { requestFor } from "./requests.js";
import { stopStream } from "./stream.js";

const LOOKS = 6;
const LOOK_MS = 50;

export class Answers {
  #library;
  #reads;
  #begun;
  #changed;
  #ended;
  #reading = new Map(); // stream → {conversation, abort}
  #waiting = new Set(); // streams that another tab reads

  /**
   * reads(conversation) is called when answers of it begin to be read, begun() once what was asked is stored,
   * changed(conversation, message) for all that comes, and ended(conversation, messages) when a stream's are final.
   */
  constructor(library, { reads, begun, changed, ended }) {
    this.#library = library;
    this.#reads = reads;
    this.#begun = begun;
    this.#changed = changed;
    this.#ended = ended;
  }

  isReading(conversation) {
    return this.#of(conversation.id).length > 0;
  }

  /** Asks for the answers, which are samples of one question if they are several. */
  begin(conversation, messages, model) {
    const streams = streamsOf(messages);
    let missing = streams.length;
    let save;
    const saved = new Promise((resolve) => {
      save = resolve;
    });
    for (const stream of streams) {
      const read = messages.filter((message) => message.stream === stream);
      const request = async (signal) => {
        missing -= 1;
        // Other tabs may see them only when all are this tab's, for they adopt what nobody reads.
        if (missing === 0) {
          this.#library.saveNow(conversation);
          this.#begun();
          save();
        }
        await saved;
        return requestFor(conversation, read, model, messages.indexOf(read[0]), signal);
      };
      this.#read(conversation, read, request);
    }
  }

  /** Reads on what was found unfinished, now or when no other tab reads it any more. */
  async adopt(conversation) {
    for (const stream of streamsOf(conversation.unfinished)) {
      if (this.#reading.has(stream) || this.#waiting.has(stream)) continue;
      const messages = conversation.answersOf(stream);
      for (const message of messages) conversation.expect(message);
      this.#waiting.add(stream);
      this.#library.hold(conversation);
      alone(stream, async () => {
        this.#waiting.delete(stream);
        if (!this.#library.find(conversation.id)) return; // it was deleted meanwhile
        this.#library.catchUp(conversation);
        await told(messages);
        if (messages.some(isUnfinished)) await this.#readAlone(conversation, messages, () => null);
        else this.#ended(conversation, messages);
      }).finally(() => this.#library.release(conversation));
    }
  }

  /** Ends the answers of a conversation, on the server as well. */
  stop(id) {
    for (const [stream, { abort }] of this.#of(id)) {
      stopStream(stream);
      abort.abort();
    }
  }

  /** The page goes away; whoever comes next reads on. */
  leave() {
    for (const { abort } of this.#reading.values()) abort.abort(LEFT);
  }

  #of(id) {
    return [...this.#reading].filter(([, { conversation }]) => conversation.id === id);
  }

  #read(conversation, messages, request) {
    this.#library.hold(conversation);
    const work = this.#readAlone(conversation, messages, request, alone);
    work.finally(() => this.#library.release(conversation));
  }

  async #readAlone(conversation, messages, request, within = (_, work) => work()) {
    const [{ stream }] = messages;
    const abort = new AbortController();
    this.#reading.set(stream, { conversation, abort });
    this.#reads(conversation);
    const changed = (message) => {
      this.#library.saveSoon(conversation);
      this.#changed(conversation, message);
    };
    const read = async () => {
      const asked = await request(abort.signal);
      const waits = (queued) => {
        for (const message of messages) {
          if (queued) message.queued = true;
          else delete message.queued;
        }
        messages.forEach(changed);
      };
      return lines.run(() => readAnswers(messages, asked, abort.signal, changed), abort.signal, waits);
    };
    await within(stream, async () => {
      for (const message of messages) conversation.setWriting(message, true);
      await untilAuthorised(messages, read);
      for (const message of messages) conversation.setWriting(message, false);
      if (abort.signal.reason !== LEFT) this.#library.saveNow(conversation); // before another tab has its turn
    });
    this.#reading.delete(stream);
    if (abort.signal.reason !== LEFT) this.#ended(conversation, messages);
  }
}

const isUnfinished = ({ status }) => status === "streaming";
const streamsOf = (messages) => [...new Set(messages.map(({ stream }) => stream))];

/** Waits for what another tab stored last of them: its lock may be free before that is seen here. */
async function told(messages) {
  for (let looks = 0; looks < LOOKS && messages.some(isUnfinished); looks += 1) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

/** Runs `work` while no other tab reads the stream. A page of plain http on another host has no locks. */
async function alone(stream, work) {
  if (!navigator.locks) return work();
  return navigator.locks.request(`quire.stream.${stream}`, work);
}

/** Runs `attempt` again with each key that the user gives; without one the messages say why it failed. */
async function untilAuthorised(messages, attempt) {
  for (;;) {
    try {
      return await attempt();
    } catch (error) {
      if (error === LEFT) return undefined;
      if (error.status === 401 && (await askForKey())) continue;
      const stopped = error.name === "AbortError";
      const reason = { message: error.message, status: error.status ?? 0, code: error.code ?? null };
      const fields = stopped ? { status: "stopped" } : { status: "error", error: reason };
      for (const message of messages.filter(isUnfinished)) Object.assign(message, fields);
      return undefined;
    }
  }
}
