// How many long streams this browser reads at once. It has six connections for each server, over all its windows, and the
// counts of the blocks take one: one is left for what is short, such as the request that stops a stream.

const MOST = 4;

/** The lines of one page, where the browser has no locks: a page of plain http on another host. */
class OwnLines {
  #free = MOST;
  #waiting = []; // of each who waits, what gives it a line

  async run(work, signal, waits) {
    if (this.#free > 0) this.#free -= 1;
    else await this.#turn(signal, waits);
    try {
      return await work();
    } finally {
      const next = this.#waiting.shift();
      if (next) next();
      else this.#free += 1;
    }
  }

  async #turn(signal, waits) {
    waits(true);
    try {
      await new Promise((resolve, reject) => {
        const leave = () => {
          this.#waiting = this.#waiting.filter((other) => other !== take);
          reject(signal.reason);
        };
        const take = () => {
          signal.removeEventListener("abort", leave);
          resolve();
        };
        this.#waiting.push(take);
        signal.addEventListener("abort", leave, { once: true });
        if (signal.aborted) leave();
      });
    } finally {
      waits(false);
    }
  }
}

/** The lines of all windows: each is a lock, which the browser frees when a window is closed or crashes. */
class SharedLines {
  #names = Array.from({ length: MOST }, (_, i) => `quire.line.${i}`);

  async run(work, signal, waits) {
    const release = (await this.#free()) ?? (await this.#turn(signal, waits));
    try {
      return await work();
    } finally {
      release();
    }
  }

  async #free() {
    for (const name of this.#names) {
      const release = await taken(name, { ifAvailable: true });
      if (release) return release;
    }
    return null;
  }

  /** Waits for all of them, and takes the first that it gets. */
  async #turn(signal, waits) {
    const over = new AbortController();
    const options = { signal: AbortSignal.any([signal, over.signal]) };
    waits(true);
    try {
      return await Promise.race(this.#names.map((name) => taken(name, options)));
    } finally {
      over.abort();
      waits(false);
    }
  }
}

/** A function that gives back the lock; null if it is not available. One that comes too late is given back at once. */
function taken(name, options) {
  return new Promise((resolve, reject) => {
    const hold = (lock) => {
      options.signal?.throwIfAborted();
      if (lock === null) return resolve(null);
      return new Promise((release) => resolve(release));
    };
    navigator.locks.request(name, options, hold).catch(reject);
  });
}

/**
 * run(work, signal, waits) runs `work` once there is a line for it. It calls waits(true) if it has to wait for that, and
 * waits(false) afterwards.
 */
export const lines = navigator.locks ? new SharedLines() : new OwnLines();
