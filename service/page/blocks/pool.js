// All blocks at a moment: states, reference counts, since when, and who holds which.

const NOBODY = -1;

/** Of a sequence among all: "request.index". */
const nameOf = ({ request, index }) => `${request}.${index}`;

export class PoolModel {
  numBlocks = 0; // of the device; those of the host come after them
  numHostBlocks = 0;
  blockSize = 0;
  at = 0;
  waiting = 0;
  states = new Uint8Array(0);
  references = new Uint8Array(0);
  since = new Float64Array(0); // NaN: it has not changed since somebody watches
  tables = new Map(); // name -> {request, index, state, tokens, blocks, host_blocks}

  get size() {
    return this.numBlocks + this.numHostBlocks;
  }

  /** Takes a whole map. */
  load(update) {
    this.numBlocks = update.num_blocks;
    this.numHostBlocks = update.num_host_blocks;
    this.blockSize = update.block_size;
    this.at = update.at;
    this.waiting = update.waiting;
    this.states = update.states.slice();
    this.references = update.references.slice();
    this.since = Float64Array.from(update.ages, (age) => (age < 0 ? NaN : update.at - age));
    this.tables = new Map(update.tables.map((table) => [nameOf(table), table]));
  }

  copy() {
    const other = new PoolModel();
    Object.assign(other, this);
    other.states = this.states.slice();
    other.references = this.references.slice();
    other.since = this.since.slice();
    other.tables = new Map(this.tables);
    return other;
  }

  /** The change from here to what `update` says, which `apply` makes and `revert` unmakes. */
  change(update) {
    const places = update.full ? this.#differing(update) : update.places;
    const pick = (array) => (update.full ? Uint8Array.from(places, (place) => array[place]) : array);
    const after = new Map();
    for (const table of update.tables) {
      const before = this.tables.get(nameOf(table));
      const kept = before && table.first > 0 ? before.blocks.subarray(0, table.first) : [];
      const blocks = new Int32Array(kept.length + table.blocks.length);
      blocks.set(kept);
      blocks.set(table.blocks, kept.length);
      after.set(nameOf(table), { ...table, blocks });
    }
    const gone = update.full
      ? [...this.tables.keys()].filter((name) => !after.has(name))
      : update.gone.map(([request, index]) => `${request}.${index}`);
    for (const name of gone) after.set(name, null);
    const now = { states: pick(update.states), references: pick(update.references), since: new Float64Array(places.length).fill(update.at) };
    const then = { states: new Uint8Array(places.length), references: new Uint8Array(places.length), since: new Float64Array(places.length) };
    places.forEach((place, i) => {
      for (const part of ["states", "references", "since"]) then[part][i] = this[part][place];
    });
    const before = new Map([...after.keys()].map((name) => [name, this.tables.get(name) ?? null]));
    return {
      places,
      now: { ...now, tables: after, at: update.at, waiting: update.waiting },
      then: { ...then, tables: before, at: this.at, waiting: this.waiting },
      moves: update.moves,
      movesLost: update.moves_lost,
    };
  }

  #differing({ states, references }) {
    const places = [];
    for (let place = 0; place < states.length; place += 1) {
      if (states[place] !== this.states[place] || references[place] !== this.references[place]) places.push(place);
    }
    return Int32Array.from(places);
  }

  apply({ places, now }) {
    this.#become(places, now);
  }

  revert({ places, then }) {
    this.#become(places, then);
  }

  #become(places, side) {
    for (const part of ["states", "references", "since"]) {
      const [to, from] = [this[part], side[part]];
      for (let i = 0; i < places.length; i += 1) to[places[i]] = from[i];
    }
    for (const [name, table] of side.tables) {
      if (table === null) this.tables.delete(name);
      else this.tables.set(name, table);
    }
    this.at = side.at;
    this.waiting = side.waiting;
  }

  /** How many of the device's blocks, or of the host's, are in each state. */
  counts(host = false) {
    const counts = new Array(6).fill(0);
    const [begin, end] = host ? [this.numBlocks, this.size] : [0, this.numBlocks];
    for (let place = begin; place < end; place += 1) counts[this.states[place]] += 1;
    return counts;
  }

  /** By place, the request that holds the block (the first of them), or -1. */
  owners() {
    const owners = new Int32Array(this.size).fill(NOBODY);
    for (const { request, blocks, host_blocks: host } of this.tables.values()) {
      for (let i = 0; i < blocks.length; i += 1) if (owners[blocks[i]] === NOBODY) owners[blocks[i]] = request;
      for (let i = 0; i < host.length; i += 1) owners[this.numBlocks + host[i]] = request;
    }
    return owners;
  }

  /** The sequences that hold a block: [{request, index, logical}]. */
  holders(place) {
    const host = place >= this.numBlocks;
    const number = host ? place - this.numBlocks : place;
    const found = [];
    for (const table of this.tables.values()) {
      const logical = (host ? table.host_blocks : table.blocks).indexOf(number);
      if (logical >= 0) found.push({ request: table.request, index: table.index, logical });
    }
    return found;
  }

  /** By request, its sequences in order. */
  requests() {
    const requests = new Map();
    for (const table of this.tables.values()) {
      if (!requests.has(table.request)) requests.set(table.request, []);
      requests.get(table.request).push(table);
    }
    for (const sequences of requests.values()) sequences.sort((a, b) => a.index - b.index);
    return requests;
  }
}
