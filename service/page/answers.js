// The answers that this tab reads, of any conversation. One that another tab reads is waited for: if that tab goes away
// before the answer is complete, this one reads on.

import { LEFT, readAnswer } from "./answer.js";
import { askForKey } from "./keyprompt.js";
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
  #reading = new Map(); // message → {conversation, abort}
  #waiting = new Set(); // ids of messages that another tab reads

  /**
   * reads(conversation) is called when an answer of it begins to be read, begun() once what was asked is stored,
   * changed(conversation, message) for all that comes, and ended(conversation, message) when it is final.
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
    let missing = messages.length;
    let save;
    const saved = new Promise((resolve) => {
      save = resolve;
    });
    messages.forEach((message, index) => {
      const request = async (signal) => {
        missing -= 1;
        // Other tabs may see them only when all are this tab's, for they adopt what nobody reads.
        if (missing === 0) {
          this.#library.saveNow(conversation);
          this.#begun();
          save();
        }
        await saved;
        return requestFor(conversation, message, model, index, signal);
      };
      this.#read(conversation, message, request);
    });
  }

  /** Reads on what was found unfinished, now or when no other tab reads it any more. */
  async adopt(conversation) {
    for (const message of conversation.unfinished) {
      if (this.#reading.has(message) || this.#waiting.has(message.id)) continue;
      conversation.expect(message);
      this.#waiting.add(message.id);
      this.#library.hold(conversation);
      alone(message.stream, async () => {
        this.#waiting.delete(message.id);
        if (!this.#library.find(conversation.id)) return; // it was deleted meanwhile
        this.#library.catchUp(conversation);
        await told(message);
        if (message.status === "streaming") await this.#readAlone(conversation, message, () => null);
        else this.#ended(conversation, message);
      }).finally(() => this.#library.release(conversation));
    }
  }

  /** Ends the answers of a conversation, on the server as well. */
  stop(id) {
    for (const [message, { abort }] of this.#of(id)) {
      stopStream(message.stream);
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

  #read(conversation, message, request) {
    this.#library.hold(conversation);
    const work = this.#readAlone(conversation, message, request, alone);
    work.finally(() => this.#library.release(conversation));
  }

  async #readAlone(conversation, message, request, within = (stream, work) => work()) {
    const abort = new AbortController();
    this.#reading.set(message, { conversation, abort });
    this.#reads(conversation);
    const changed = () => {
      this.#library.saveSoon(conversation);
      this.#changed(conversation, message);
    };
    const read = async () => readAnswer(message, await request(abort.signal), abort.signal, changed);
    await within(message.stream, async () => {
      conversation.setWriting(message, true);
      await untilAuthorised(message, read);
      conversation.setWriting(message, false);
      if (abort.signal.reason !== LEFT) this.#library.saveNow(conversation); // before another tab has its turn
    });
    this.#reading.delete(message);
    if (abort.signal.reason !== LEFT) this.#ended(conversation, message);
  }
}

/** Waits for what another tab stored last of a message: its lock may be free before that is seen here. */
async function told(message) {
  for (let looks = 0; looks < LOOKS && message.status === "streaming"; looks += 1) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

/** Runs `work` while no other tab reads the stream. A page of plain http on another host has no locks. */
async function alone(stream, work) {
  if (!navigator.locks) return work();
  return navigator.locks.request(`quire.stream.${stream}`, work);
}

/** Runs `attempt` again with each key that the user gives; without one the message says why it failed. */
async function untilAuthorised(message, attempt) {
  for (;;) {
    try {
      return await attempt();
    } catch (error) {
      if (error.status === 401 && (await askForKey())) continue;
      if (error.name === "AbortError") {
        message.status = "stopped";
        return undefined;
      }
      message.status = "error";
      message.error = { message: error.message, status: error.status ?? 0, code: error.code ?? null };
      return undefined;
    }
  }
}
