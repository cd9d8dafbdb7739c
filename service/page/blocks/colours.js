// What colour a block has, by state, owner, references, age or prefix: one RGBA number for each.

import { STATES } from "./updates.js";

const AGES = 12; // shades, each twice as old as the one before
const UNKNOWN_AGE = AGES;

/** Little-endian RGBA of CSS colours, as the theme has them now. */
export class Palette {
  constructor(root = document.documentElement) {
    const style = getComputedStyle(root);
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const resolve = (colour) => {
      probe.clearRect(0, 0, 1, 1);
      probe.fillStyle = colour;
      probe.fillRect(0, 0, 1, 1);
      const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
      return (255 << 24) | (b << 16) | (g << 8) | r;
    };
    const element = document.createElement("i");
    element.hidden = true;
    root.append(element);
    const variable = (name) => {
      element.style.color = `var(${name})`; // getPropertyValue would give light-dark() as it is written
      return getComputedStyle(element).color;
    };
    this.dark = style.colorScheme.includes("dark") && variable("--paper") === "rgb(19, 22, 21)";
    this.css = Object.fromEntries(
      ["paper", "ink", "ink-soft", "line-strong", "accent", "free", "active", "cached", "danger"].map((name) => [name, variable(`--${name}`)]),
    );
    element.remove();
    const light = this.dark ? 62 : 45;
    this.states = [
      this.css.free,
      this.css.active,
      this.css.cached,
      `hsl(200 70% ${light}%)`,
      `hsl(285 45% ${light}%)`,
      `hsl(20 75% ${light}%)`,
    ];
    this.stateNumbers = Uint32Array.from(this.states, (colour) => resolve(colour) >>> 0);
    this.free = this.stateNumbers[0];
    const step = (i, count) => (this.dark ? 30 + (45 * i) / count : 82 - (52 * i) / count);
    this.references = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => `hsl(${172 - 22 * i} 65% ${step(i, 7)}%)`);
    this.referenceNumbers = Uint32Array.from(this.references, (colour) => resolve(colour) >>> 0);
    this.ages = Array.from({ length: AGES }, (_, i) => `hsl(172 ${80 - 6 * i}% ${this.dark ? 68 - 4 * i : 32 + 4.2 * i}%)`).concat(this.css["line-strong"]);
    this.ageNumbers = Uint32Array.from(this.ages, (colour) => resolve(colour) >>> 0);
    this.owners = Array.from({ length: 64 }, (_, i) => this.ownerColour(i));
    this.ownerNumbers = Uint32Array.from(this.owners, (colour) => resolve(colour) >>> 0);
  }

  /** Neighbouring numbers are far apart on the wheel. */
  ownerColour(number) {
    const hue = Math.round((number * 137.508) % 360);
    return `hsl(${hue} ${55 + ((number >> 3) % 3) * 12}% ${(this.dark ? 58 : 44) + ((number >> 2) % 3) * 6}%)`;
  }
}

/** Writes the colour of each block to `pixels` (Uint32Array). `runs`: by block, the text that it begins with. */
export function paint(pixels, model, mode, palette, { now, runs, focus }) {
  const { states, references, since, size } = model;
  const { stateNumbers, referenceNumbers, ageNumbers, ownerNumbers, free } = palette;
  if (mode === "state") {
    for (let i = 0; i < size; i += 1) pixels[i] = stateNumbers[states[i]];
  } else if (mode === "references") {
    for (let i = 0; i < size; i += 1) {
      const count = references[i];
      pixels[i] = count === 0 ? (states[i] === 0 ? free : referenceNumbers[0]) : referenceNumbers[Math.min(7, count)];
    }
  } else if (mode === "age") {
    for (let i = 0; i < size; i += 1) {
      if (states[i] === 0) pixels[i] = free;
      else pixels[i] = ageNumbers[ageShade(now - since[i])];
    }
  } else {
    const numbers = mode === "owner" ? model.owners() : runs;
    for (let i = 0; i < size; i += 1) {
      const number = i < numbers.length ? numbers[i] : -1;
      if (number >= 0) pixels[i] = ownerNumbers[number % 64];
      else pixels[i] = states[i] === 0 ? free : ageNumbers[UNKNOWN_AGE];
    }
  }
  if (focus) {
    for (let i = 0; i < size; i += 1) if (!focus.has(i)) pixels[i] = (pixels[i] & 0x00ffffff) | (46 << 24);
  }
}

function ageShade(seconds) {
  if (Number.isNaN(seconds)) return UNKNOWN_AGE;
  return Math.min(AGES - 1, Math.max(0, Math.floor(Math.log2(Math.max(seconds, 0.25) * 4))));
}

/** [[colour, words]] of a mode. */
export function legendOf(mode, palette) {
  if (mode === "state") return STATES.map((state, i) => [palette.states[i], state === "transfer" ? "in transfer" : state]);
  if (mode === "references") return palette.references.map((colour, i) => [colour, i === 0 ? "none, cached" : i === 7 ? "7 and more" : String(i)]);
  if (mode === "age") {
    const words = ["now", "", "1 s", "", "4 s", "", "16 s", "", "1 min", "", "4 min", "older", "unknown"];
    return palette.ages.map((colour, i) => [colour, words[i]]).filter(([, word]) => word !== "");
  }
  const rest = [palette.ages[UNKNOWN_AGE], mode === "owner" ? "nobody's, cached" : "of no text in the cache"];
  return [[palette.owners[1], mode === "owner" ? "a colour for each request" : "a colour for each text"], rest];
}
