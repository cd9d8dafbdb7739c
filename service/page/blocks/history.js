// Time travel: the changes of the last minutes, which can be gone through backwards and forwards.

const MAX_LOOKS = 2400;
const MAX_SINGLE = 20_000; // changes; those of earlier looks become one each
const MAX_PLACES = 4_000_000; // in all of them
const MAX_SECONDS = 600;

/** The model that is shown, at any moment of the history. It follows the newest as long as it is `live`. */
export class History {
  #changes = [];
  #looks = 0; // that have come
  #joined = 0; // changes at the beginning that are of a whole look each
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
    this.#places = this.#at = this.#joined = 0;
    this.live = true;
  }

  /** Takes an update, move by move; the shown model moves on with it only if it is live. Returns whether anything is different. */
  take(update) {
    let differs = false;
    for (const part of singly(update, this.#newest.waiting)) {
      const change = { ...this.#newest.change(part), look: this.#looks };
      this.#newest.apply(change);
      this.#changes.push(change);
      this.#places += change.places.length;
      differs ||= change.places.length > 0 || change.now.tables.size > 0;
    }
    this.#looks += 1;
    if (this.live) this.#go(this.#changes.length);
    while (this.#changes.length - this.#joined > MAX_SINGLE) this.#join();
    while (
      this.#changes.length > 1 &&
      (this.#looks - this.#changes[0].look > MAX_LOOKS || this.#places > MAX_PLACES || update.at - this.#changes[0].now.at > MAX_SECONDS)
    ) {
      if (this.#at === 0) this.#go(1); // what is shown is about to be forgotten
      this.#places -= this.#changes.shift().places.length;
      this.#at -= 1;
      this.#joined = Math.max(0, this.#joined - 1);
    }
    return differs;
  }

  /** Makes one change of those of the earliest look that has several. */
  #join() {
    const begin = this.#joined;
    const { look } = this.#changes[begin];
    let end = begin + 1;
    while (end < this.#changes.length && this.#changes[end].look === look) end += 1;
    this.#joined += 1;
    if (end === begin + 1) return;
    if (this.#at > begin && this.#at < end) this.#go(end); // the moment that is shown is no more
    const parts = this.#changes.slice(begin, end);
    const whole = joined(parts);
    this.#changes.splice(begin, parts.length, whole);
    this.#places += whole.places.length - parts.reduce((sum, { places }) => sum + places.length, 0);
    if (this.#at >= end) this.#at -= parts.length - 1;
  }

  /** How many changes have come so many seconds after the shown moment: one more, at least. */
  after(seconds) {
    const until = this.shown.at + seconds;
    let position = Math.min(this.#at + 1, this.#changes.length);
    while (position < this.#changes.length && this.#changes[position].now.at <= until) position += 1;
    return position;
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

/** Splits an update into one for each of its moves. What else is different comes with the last. */
function* singly(update, waiting) {
  for (const move of update.moves.slice(0, -1)) {
    const [places, states, references] = [0, 1, 2].map((part) => move.effects.filter((_, i) => i % 3 === part));
    yield {
      ...update,
      full: false,
      at: move.at,
      waiting,
      places: Int32Array.from(places),
      states: Uint8Array.from(states),
      references: Uint8Array.from(references),
      tables: [],
      gone: [],
      moves: [move],
      moves_lost: 0,
    };
  }
  yield { ...update, moves: update.moves.slice(-1) };
}

/** One change in place of several that follow each other. */
function joined(changes) {
  const [first, last] = [new Map(), new Map()];
  for (const { places, then, now } of changes) {
    places.forEach((place, i) => {
      if (!first.has(place)) first.set(place, [then, i]);
      last.set(place, [now, i]);
    });
  }
  const places = Int32Array.from(first.keys());
  const side = (found, kind, tables, { at, waiting }) => {
    const pick = (part) => kind[part].from(places, (place) => found.get(place)[0][part][found.get(place)[1]]);
    return { states: pick("states"), references: pick("references"), since: pick("since"), tables, at, waiting };
  };
  const arrays = { states: Uint8Array, references: Uint8Array, since: Float64Array };
  const tablesOf = (name, all) => new Map(all.flatMap((change) => [...change[name].tables]));
  const end = changes.at(-1);
  return {
    places,
    now: side(last, arrays, tablesOf("now", changes), end.now),
    then: side(first, arrays, tablesOf("then", changes.toReversed()), changes[0].then),
    moves: changes.flatMap(({ moves }) => moves),
    movesLost: changes.reduce((sum, { movesLost }) => sum + movesLost, 0),
    look: end.look,
  };
}
