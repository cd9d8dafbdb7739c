// The map of blocks on a canvas: a pixel for each block, scaled without smoothing; numbers where there is room.

const MARGIN = 8; // pixels around a map that is seen as a whole
const MOST_CELL = 96;
const GRID_FROM = 5; // pixels of a cell, from which on lines part the blocks
const TEXT_FROM = 26;
const MOVED = 6; // pixels that make a press a drag

export class BlockMap {
  #canvas;
  #box;
  #context;
  #image = null; // a canvas with a pixel for each block
  #pixels = null;
  #imageContext = null;
  #data = null;
  #columns = 1;
  #deviceRows = 1;
  #rows = 1;
  #model = null;
  #cell = 8; // pixels, CSS
  #x = 0; // of the map's corner in the canvas
  #y = 0;
  #fitted = true;
  #wanted = false;
  #pointers = new Map();
  #pressed = null;
  #marked = -1;
  #paint;
  #chosen;
  #palette = null;
  frames = 0;

  /**
   * paint(pixels, model) colours the blocks; chosen(place, lasting) hears of the block that is pointed at (or -1),
   * or is chosen for good by a click, a tap or a key.
   */
  constructor(canvas, box, { paint, chosen }) {
    this.#canvas = canvas;
    this.#box = box;
    this.#context = canvas.getContext("2d");
    this.#paint = paint;
    this.#chosen = chosen;
    new ResizeObserver(() => this.#resize()).observe(box);
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => this.#up(event));
    canvas.addEventListener("pointerleave", () => this.#chosen(-1, false));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  set palette(palette) {
    this.#palette = palette;
    this.repaint();
  }

  show(model) {
    const sized = !this.#model || this.#model.size !== model.size || this.#model.numBlocks !== model.numBlocks;
    this.#model = model;
    if (sized) this.#lay();
    this.repaint();
  }

  mark(place) {
    this.#marked = place;
    this.#draw();
  }

  /** Colours all blocks anew, in the next frame. */
  repaint() {
    this.#stale = true;
    this.#draw();
  }

  #stale = true;

  fit() {
    this.#fitted = true;
    this.#lay();
    this.#draw();
  }

  zoom(factor, x = this.#width / 2, y = this.#height / 2) {
    const cell = Math.min(Math.max(this.#cell * factor, this.#least), MOST_CELL);
    this.#x = x - ((x - this.#x) * cell) / this.#cell;
    this.#y = y - ((y - this.#y) * cell) / this.#cell;
    this.#cell = cell;
    this.#fitted = cell === this.#least;
    this.#hold();
    this.#draw();
  }

  /** Brings a block into sight, large enough to be read. */
  reveal(place) {
    const [column, row] = this.#spot(place);
    this.#cell = Math.max(this.#cell, Math.min(TEXT_FROM, MOST_CELL));
    this.#fitted = false;
    this.#x = this.#width / 2 - (column + 0.5) * this.#cell;
    this.#y = this.#height / 2 - (row + 0.5) * this.#cell;
    this.#hold();
    this.mark(place);
  }

  get #width() {
    return this.#box.clientWidth;
  }

  get #height() {
    return this.#box.clientHeight;
  }

  get #least() {
    return Math.min((this.#width - 2 * MARGIN) / this.#columns, (this.#height - 2 * MARGIN) / this.#rows, 44);
  }

  /** Chooses so many columns that all blocks fill the box. */
  #lay() {
    const { numBlocks = 0, numHostBlocks = 0 } = this.#model ?? {};
    if (!numBlocks || !this.#width) return;
    const shape = this.#width / this.#height;
    this.#columns = Math.max(1, Math.min(numBlocks, Math.round(Math.sqrt((numBlocks + numHostBlocks) * shape))));
    this.#deviceRows = Math.ceil(numBlocks / this.#columns);
    this.#rows = this.#deviceRows + (numHostBlocks ? 1 + Math.ceil(numHostBlocks / this.#columns) : 0);
    this.#image = new OffscreenCanvas(this.#columns, this.#rows);
    this.#imageContext = this.#image.getContext("2d");
    this.#data = this.#imageContext.createImageData(this.#columns, this.#rows);
    this.#pixels = new Uint32Array(this.#data.data.buffer);
    if (this.#fitted) this.#cell = this.#least;
    this.#hold();
    this.#stale = true;
  }

  #resize() {
    const ratio = window.devicePixelRatio || 1;
    this.#canvas.width = Math.round(this.#width * ratio);
    this.#canvas.height = Math.round(this.#height * ratio);
    this.#lay();
    this.#draw();
  }

  /** Keeps the map in the canvas: in its middle while it is smaller. */
  #hold() {
    const place = (at, room, size) => (size <= room ? (room - size) / 2 : Math.min(0, Math.max(room - size, at)));
    this.#x = place(this.#x, this.#width, this.#columns * this.#cell);
    this.#y = place(this.#y, this.#height, this.#rows * this.#cell);
  }

  #draw() {
    if (this.#wanted) return;
    this.#wanted = true;
    requestAnimationFrame(() => {
      this.#wanted = false;
      this.#frame();
    });
  }

  #frame() {
    if (!this.#model || !this.#image || !this.#palette) return;
    if (this.#stale) this.#colour();
    this.frames += 1;
    const [context, ratio, cell] = [this.#context, window.devicePixelRatio || 1, this.#cell];
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.imageSmoothingEnabled = cell < 1;
    const [first, last] = [Math.max(0, Math.floor(-this.#y / cell)), Math.min(this.#rows, Math.ceil((this.#height - this.#y) / cell))];
    const [left, right] = [Math.max(0, Math.floor(-this.#x / cell)), Math.min(this.#columns, Math.ceil((this.#width - this.#x) / cell))];
    if (last <= first || right <= left) return;
    const [columns, rows] = [right - left, last - first];
    context.drawImage(this.#image, left, first, columns, rows, this.#x + left * cell, this.#y + first * cell, columns * cell, rows * cell);
    if (cell >= GRID_FROM) this.#lines(left, right, first, last);
    if (cell >= TEXT_FROM) this.#texts(left, right, first, last);
    if (this.#marked >= 0) this.#outline(this.#marked);
  }

  #colour() {
    this.#stale = false;
    const [{ numBlocks, numHostBlocks, size }, pixels] = [this.#model, this.#pixels];
    const colours = new Uint32Array(size);
    this.#paint(colours, this.#model);
    pixels.fill(0);
    pixels.set(colours.subarray(0, numBlocks));
    if (numHostBlocks) pixels.set(colours.subarray(numBlocks), (this.#deviceRows + 1) * this.#columns);
    this.#imageContext.putImageData(this.#data, 0, 0);
  }

  #lines(left, right, first, last) {
    const [context, cell] = [this.#context, this.#cell];
    context.strokeStyle = this.#palette.css.paper;
    context.lineWidth = Math.min(3, cell / 8);
    context.beginPath();
    for (let column = left; column <= right; column += 1) {
      context.moveTo(this.#x + column * cell, this.#y + first * cell);
      context.lineTo(this.#x + column * cell, this.#y + last * cell);
    }
    for (let row = first; row <= last; row += 1) {
      context.moveTo(this.#x + left * cell, this.#y + row * cell);
      context.lineTo(this.#x + right * cell, this.#y + row * cell);
    }
    context.stroke();
  }

  #texts(left, right, first, last) {
    const [context, cell, model] = [this.#context, this.#cell, this.#model];
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = this.#palette.css.ink;
    context.font = `600 ${Math.round(cell * 0.36)}px ui-sans-serif, system-ui, sans-serif`;
    for (let row = first; row < last; row += 1) {
      for (let column = left; column < right; column += 1) {
        const place = this.#placeAt(column, row);
        if (place < 0) continue;
        const count = model.references[place];
        if (count) context.fillText(String(count), this.#x + (column + 0.5) * cell, this.#y + (row + 0.48) * cell);
      }
    }
  }

  #outline(place) {
    const [[column, row], cell] = [this.#spot(place), this.#cell];
    this.#context.strokeStyle = this.#palette.css.ink;
    this.#context.lineWidth = 2;
    const size = Math.max(cell, 6);
    this.#context.strokeRect(this.#x + (column + 0.5) * cell - size / 2, this.#y + (row + 0.5) * cell - size / 2, size, size);
  }

  #spot(place) {
    const { numBlocks } = this.#model;
    const host = place >= numBlocks;
    const number = host ? place - numBlocks : place;
    return [number % this.#columns, Math.floor(number / this.#columns) + (host ? this.#deviceRows + 1 : 0)];
  }

  /** The block in a cell, or -1. */
  #placeAt(column, row) {
    if (!this.#model || column < 0 || column >= this.#columns || row < 0) return -1;
    const { numBlocks, size } = this.#model;
    const number = (row < this.#deviceRows ? row : row - this.#deviceRows - 1) * this.#columns + column;
    if (row < this.#deviceRows) return number < numBlocks ? number : -1;
    return row > this.#deviceRows && numBlocks + number < size ? numBlocks + number : -1;
  }

  #under(event) {
    const { left, top } = this.#canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - left - this.#x) / this.#cell);
    const row = Math.floor((event.clientY - top - this.#y) / this.#cell);
    return this.#placeAt(column, row);
  }

  #wheel(event) {
    event.preventDefault();
    const { left, top } = this.#canvas.getBoundingClientRect();
    this.zoom(2 ** (-event.deltaY / 240), event.clientX - left, event.clientY - top);
  }

  #down(event) {
    this.#canvas.setPointerCapture(event.pointerId);
    this.#pointers.set(event.pointerId, [event.clientX, event.clientY]);
    this.#pressed = this.#pointers.size === 1 ? [event.clientX, event.clientY] : null;
  }

  #move(event) {
    const before = this.#pointers.get(event.pointerId);
    if (!before) {
      this.#chosen(this.#under(event), false);
      return;
    }
    const now = [event.clientX, event.clientY];
    if (this.#pressed && Math.hypot(now[0] - this.#pressed[0], now[1] - this.#pressed[1]) > MOVED) this.#pressed = null;
    if (this.#pointers.size === 2) {
      const [other] = [...this.#pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
      const { left, top } = this.#canvas.getBoundingClientRect();
      const distance = ([x, y]) => Math.max(1, Math.hypot(x - other[0], y - other[1]));
      this.zoom(distance(now) / distance(before), (now[0] + other[0]) / 2 - left, (now[1] + other[1]) / 2 - top);
    } else if (!this.#pressed) {
      this.#pan(now[0] - before[0], now[1] - before[1]);
    }
    if (!this.#pressed || this.#pointers.size === 2) this.#pointers.set(event.pointerId, now);
  }

  #up(event) {
    this.#pointers.delete(event.pointerId);
    if (this.#pressed && event.type === "pointerup") this.#chosen(this.#under(event), true);
    this.#pressed = null;
  }

  #pan(x, y) {
    this.#x += x;
    this.#y += y;
    this.#hold();
    this.#draw();
  }

  #key(event) {
    const pans = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (pans[event.key]) this.#pan(...pans[event.key]);
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }
}
