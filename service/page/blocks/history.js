// Time travel: the changes of the last minutes, which can be gone through backwards and forwards.

const MAX_CHANGES = 2400;
const MAX_PLACES = 4_000_000; // in all of them
const MAX_SECONDS = 600;

/** The model that is shown, at any moment of the history. It follows the newest as long as it is `live`. */
export class History {
  #changes = [];
  #places = 0;
  #newest = null; // the model at the end
  #at = 0; // how many changes the shown model has
  shown = null;
  live = true;

  get length() {
    return this.#changes.length;
  }

  get position() {
    return this.#at;
  }

  get newest() {
    return this.#newest;
  }

  get changes() {
    return this.#changes;
  }

  begin(model) {
    this.#newest = model;
    this.shown = model.copy();
    this.#changes = [];
    this.#places = this.#at = 0;
    this.live = true;
  }

  /** Takes an update; the shown model moves on with it only if it is live. */
  take(update) {
    const change = this.#newest.change(update);
    this.#newest.apply(change);
    this.#changes.push(change);
    this.#places += change.places.length;
    if (this.live) this.#go(this.#changes.length);
    while (
      this.#changes.length > 1 &&
      (this.#changes.length > MAX_CHANGES || this.#places > MAX_PLACES || update.at - this.#changes[0].now.at > MAX_SECONDS)
    ) {
      if (this.#at === 0) this.#go(1); // what is shown is about to be forgotten
      this.#places -= this.#changes.shift().places.length;
      this.#at -= 1;
    }
    return change;
  }

  /** Shows the moment after so many changes. */
  seek(position) {
    this.live = false;
    this.#go(Math.min(Math.max(position, 0), this.#changes.length));
  }

  goLive() {
    this.#go(this.#changes.length);
    this.live = true;
  }

  #go(position) {
    while (this.#at < position) this.shown.apply(this.#changes[this.#at++]);
    while (this.#at > position) this.shown.revert(this.#changes[--this.#at]);
  }

  /** The newest moves up to the shown moment, the newest first. */
  moves(most) {
    const found = [];
    for (let i = this.#at - 1; i >= 0 && found.length < most; i -= 1) {
      const { moves } = this.#changes[i];
      for (let k = moves.length - 1; k >= 0 && found.length < most; k -= 1) found.push(moves[k]);
    }
    return found;
  }
}
