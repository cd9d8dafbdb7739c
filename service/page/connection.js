// Whether the server can answer: follows its start-up, learns its models, and comes back after a loss.

import { ApiError, followStartup, listModels } from "./api.js";
import { askForKey } from "./keyprompt.js";

const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 5000;

export class Connection {
  #opening = false;
  #changed;

  /**
   * changed(state) is called with {phase: "connecting"}, {phase: "loading", progress | message},
   * {phase: "ready", models}, {phase: "offline", message}, or {phase: "locked"} when the user gave no key.
   */
  constructor(changed) {
    this.#changed = changed;
  }

  /** Tries until the server is ready, or wants a key that the user does not give. Calls meanwhile change nothing. */
  async open() {
    if (this.#opening) return;
    this.#opening = true;
    this.#changed({ phase: "connecting" });
    for (let delay = FIRST_DELAY_MS; ; delay = Math.min(delay * 2, MAX_DELAY_MS)) {
      try {
        await followStartup((progress) => {
          if (progress.phase !== "ready") this.#changed({ phase: "loading", progress });
        });
        this.#changed({ phase: "ready", models: await listModels() });
        break;
      } catch (error) {
        if (!(error instanceof ApiError)) console.error(error);
        if (error.status === 401) {
          if (await askForKey()) continue;
          this.#changed({ phase: "locked" });
          break;
        } else if (error.status === 503 && error.code !== "engine_dead") {
          this.#changed({ phase: "loading", message: error.message });
        } else {
          this.#changed({ phase: "offline", message: error.message });
        }
      }
      await new Promise((resolve) => setTimeout(resolve, delay));
    }
    this.#opening = false;
  }
}
