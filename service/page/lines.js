// How many streams this page reads at once. A browser has six connections for each server, and the map of the blocks takes
// one: some are left for what is short, such as the request that stops a stream.

const MOST = 4;

export class Lines {
  #free = MOST;
  #waiting = []; // of each who waits, what gives it a line

  /** Runs `work` once there is a line for it. Calls waits(true) if it has to wait for that, and waits(false) afterwards. */
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
