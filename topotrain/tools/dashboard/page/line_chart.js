// One chart of lines on a canvas: axes, lines, marks of events, and a cursor that several charts share.

import { clearedContext, make, makeSvg, readPalette, setText } from "./elements.js";
import { lastBefore } from "./job_view.js";

const LEFT = 58;
const RIGHT = 14;
const TOP = 22;
/** Marks so close together, in pixels, are stacked: one row for each kind. */
const STACKED = 12;
const STACK_ROWS = 3;
const ROW = 12;
const BOTTOM = 26;
const HEIGHT = 190;
/** The points that are drawn of all lines of a chart together: more cost time and show nothing more. */
const POINTS = 12000;
/** A chart names so many lines; of more it gives the range. */
export const NAMED = 6;
const NEAR_MARK = 7;
/** The pointer is at a line that is so near, in pixels. */
const NEAR_LINE = 30;
/** How long the sample of a line in the key is. */
const SAMPLE = 34;

export const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 5]];

/** Steps of 1, 2 or 5 that divide a range into about `count` parts. */
export function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) ticks.push(tick);
  return ticks;
}

/** The value of a line at x, or null; x null: its last one. */
export function lineValue(line, x) {
  if (line.points.length === 0) return null;
  if (line.level) return line.points[0][1];
  const index = x === null ? line.points.length - 1 : lastBefore(line.points, x);
  if (index < 0) return null;
  // In a gap nothing is known.
  const gap = line.points[index + 1]?.[2] ?? (index === line.points.length - 1 ? line.until ?? Infinity : Infinity);
  return x !== null && x >= gap && x > line.points[index][0] ? null : line.points[index][1];
}

const MARKS = {
  incident: ["cross", "bad"], failed: ["cross", "bad"], skipped: ["cross", "notable"], recovered: ["ring", "good"],
  snapshot: ["square", "muted"], left: ["down", "notable"], joined: ["up", "good"], resized: ["diamond", "notable"],
  evaluation: ["ring", "muted"], notice: ["dot", "muted"], ended: ["bar", "ink"],
};

/** The shape and the colour of an event's mark. */
export function markOf(kind) {
  return MARKS[kind] ?? MARKS.notice;
}

/** The sample of a line in the key: the same pattern as on the canvas. */
function sampleOf(sample) {
  if (!sample) return make("span");
  const line = makeSvg("line", { x1: 0, y1: 4, x2: SAMPLE, y2: 4, "stroke-dasharray": (DASHES[sample.dash] ?? []).join(" ") });
  return makeSvg("svg", { class: "sample", width: SAMPLE, height: 8, "aria-hidden": "true", "data-colour": sample.colour,
    "data-dash": sample.dash }, [line]);
}

/** Put marks that are close together into stacks: {place, rows: [{kind, count, chosen}], left}. */
function stacksOf(marks) {
  const stacks = [];
  for (const { place, kind, chosen } of [...marks].sort((a, b) => a.place - b.place)) {
    let stack = stacks.at(-1);
    if (!stack || place - stack.place >= STACKED) stacks.push(stack = { place, rows: [], left: 0 });
    const row = stack.rows.find((one) => one.kind === kind);
    if (row) [row.count, row.chosen] = [row.count + 1, row.chosen || chosen];
    else stack.rows.push({ kind, count: 1, chosen });
  }
  const order = Object.keys(MARKS);
  for (const stack of stacks) {
    stack.rows.sort((a, b) => Number(b.chosen) - Number(a.chosen) || order.indexOf(a.kind) - order.indexOf(b.kind));
    stack.left = stack.rows.splice(STACK_ROWS).reduce((sum, row) => sum + row.count, 0);
  }
  return stacks;
}

function drawMark(context, shape, x, y, size) {
  context.beginPath();
  if (shape === "cross") {
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size);
    context.lineTo(x - size, y + size);
    context.stroke();
    return;
  }
  if (shape === "bar") context.rect(x - 1, y - size, 2, 2 * size);
  if (shape === "square") context.rect(x - size + 1, y - size + 1, 2 * size - 2, 2 * size - 2);
  if (shape === "dot") context.arc(x, y, 2, 0, 7);
  if (shape === "ring") context.arc(x, y, size - 0.5, 0, 7);
  const turn = shape === "up" ? -1 : 1;
  if (shape === "up" || shape === "down") {
    context.moveTo(x - size, y - size * 0.8 * turn);
    context.lineTo(x + size, y - size * 0.8 * turn);
    context.lineTo(x, y + size * turn);
    context.closePath();
  }
  if (shape === "diamond") {
    context.moveTo(x, y - size);
    context.lineTo(x + size, y);
    context.lineTo(x, y + size);
    context.lineTo(x - size, y);
    context.closePath();
  }
  if (shape === "ring") context.stroke();
  else context.fill();
}

/**
 * A chart. `model` is {lines, low, high, xEnd, xText, yText, marks}; a line has {label, colour, dash, points: [[x, y, gap]]}.
 * `gap`: where a gap before the point begins. `band`: [[x, low, high]] around the line.
 */
export class LineChart {
  constructor(title, listener) {
    this.title = title;
    this._listener = listener;
    this._canvas = make("canvas", { tabindex: "0", role: "img" });
    this._cursor = make("div", { class: "cursor", hidden: true });
    this._moment = make("div", { class: "moment", hidden: true });
    this._key = make("ul", { class: "key" });
    this._said = make("p", { class: "unseen", "aria-live": "polite" });
    this._heading = make("figcaption", { text: title });
    this._plot = make("div", { class: "plot" }, [this._canvas, this._moment, this._cursor]);
    this.element = make("figure", { class: "chart" }, [this._heading, this._key, this._plot, this._said]);
    this._palette = readPalette();
    this._canvas.addEventListener("pointermove", (event) => this._pointed(event));
    this._canvas.addEventListener("pointerleave", () => this._left());
    this._canvas.addEventListener("click", (event) => this._clicked(event));
    this._canvas.addEventListener("keydown", (event) => this._pressed(event));
    this._canvas.addEventListener("blur", () => this._left());
  }

  /** Draw new data. */
  draw(model) {
    this._model = model;
    this._width = this._plot.clientWidth || 300;
    this._stacks = stacksOf(model.marks.map((mark) => ({ ...mark, place: this._pixel(mark.x) })));
    this._top = TOP + ROW * Math.max(0, ...this._stacks.map(({ rows, left }) => rows.length + (left ? 1 : 0) - 1));
    for (const line of [this._cursor, this._moment]) line.style.top = `${this._top - 4}px`;
    if (this._near) this._near = model.lines.find((line) => line.label === this._near.label) ?? null;
    this._keyEntries();
    this._paint();
    this.setCursor(this._at ?? null);
    this.setMoment(this._now ?? null);
    this._canvas.setAttribute("aria-label", `${this.title}. ${this._readout(null)}. Arrow keys move the cursor, Enter goes to that moment.`);
  }

  /** Read the colours again. */
  recolour() {
    this._palette = readPalette();
    if (this._model) this._paint();
  }

  /** Show the cursor at x, and the values there; null: the last values. */
  setCursor(x) {
    this._at = x;
    if (!this._model) return;
    this._cursor.hidden = x === null;
    if (x !== null) this._cursor.style.transform = `translateX(${this._pixel(x)}px)`;
    this._values();
  }

  /** Show the moment of the replay as a line; null: the end. */
  setMoment(x) {
    this._now = x;
    if (!this._model) return;
    this._moment.hidden = x === null;
    if (x !== null) this._moment.style.transform = `translateX(${this._pixel(x)}px)`;
    if (this._at === null) this._values();
  }

  _pixel(x) {
    return LEFT + (x / this._model.xEnd) * (this._width - LEFT - RIGHT);
  }

  _xOf(event) {
    const inside = event.clientX - this._canvas.getBoundingClientRect().left - LEFT;
    const share = inside / (this._width - LEFT - RIGHT);
    return Math.min(1, Math.max(0, share)) * this._model.xEnd;
  }

  _clicked(event) {
    if (!this._model) return;
    const x = this._xOf(event);
    const far = (mark) => Math.abs(this._pixel(mark.x) - this._pixel(x));
    const [near] = this._model.marks.filter((mark) => far(mark) < NEAR_MARK).sort((a, b) => far(a) - far(b));
    this._listener.onJump(near ? near.x : x);
  }

  _pointed(event) {
    if (!this._model) return;
    const x = this._xOf(event);
    if (this._unnamed) this._setNear(this._lineAt(x, event.clientY - this._canvas.getBoundingClientRect().top));
    this._listener.onCursor(x);
  }

  _left() {
    this._setNear(null);
    this._listener.onCursor(null);
  }

  // The line that is nearest to a place, or null.
  _lineAt(x, y) {
    const far = (line) => {
      const value = lineValue(line, x);
      return value === null ? Infinity : Math.abs(this._y(value) - y);
    };
    const [distance, line] = this._model.lines.map((one) => [far(one), one]).reduce((a, b) => (b[0] < a[0] ? b : a), [NEAR_LINE, null]);
    return distance < NEAR_LINE ? line : null;
  }

  // Name a line that the key has no entry for, and draw it in front of the others.
  _setNear(line) {
    if (this._near === line) return;
    this._near = line;
    if (!this._model) return;
    this._paint();
    this._values();
  }

  // The next line above or below, by its value at the cursor.
  _nextLine(up) {
    const x = this._at ?? this._now ?? null;
    const value = (line) => lineValue(line, x);
    const sorted = this._model.lines.filter((line) => value(line) !== null).sort((a, b) => value(a) - value(b));
    const here = sorted.indexOf(this._near);
    const next = here < 0 ? (up ? 0 : sorted.length - 1) : Math.min(sorted.length - 1, Math.max(0, here + (up ? 1 : -1)));
    this._setNear(sorted[next] ?? null);
    if (this._near) setText(this._said, `${this._near.label}: ${this._range([this._near], x)}`);
  }

  _pressed(event) {
    if (!this._model) return;
    const { xEnd } = this._model;
    const here = this._at ?? this._now ?? xEnd;
    const moves = { ArrowLeft: here - xEnd / 100, ArrowRight: here + xEnd / 100, Home: 0, End: xEnd };
    if (event.key === "Enter") this._listener.onJump(here);
    if (this._unnamed && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      event.preventDefault();
      this._nextLine(event.key === "ArrowUp");
    }
    if (!(event.key in moves)) return;
    event.preventDefault();
    const x = Math.min(xEnd, Math.max(0, moves[event.key]));
    this._listener.onCursor(x);
    setText(this._said, `${this._model.xText(x)}: ${this._readout(x)}`);
  }

  _readout(x) {
    return this._parts.map(({ label, lines }) => `${label} ${this._range(lines, x)}`).join(", ");
  }

  _range(lines, x) {
    const { yText } = this._model;
    const values = lines.map((line) => lineValue(line, x)).filter((value) => value !== null);
    if (!values.length) return "–";
    if (lines[0].band) return this._bandText(lines[0], x, yText(values[0]));
    const [low, high] = [yText(Math.min(...values)), yText(Math.max(...values))];
    return low === high ? low : `${low} to ${high}`;
  }

  _bandText({ band }, x, middle) {
    const [, low, high] = band[x === null ? band.length - 1 : Math.max(0, lastBefore(band, x))];
    const { yText } = this._model;
    return yText(low) === yText(high) ? middle : `${middle} (${yText(low)} to ${yText(high)})`;
  }

  // What the key has an entry for: each line, or each kind of lines, or all of them.
  _keyParts() {
    const { lines } = this._model;
    if (lines.length <= NAMED) return lines.map((line) => ({ label: line.label, sample: line, lines: [line] }));
    const kinds = [...new Set([...lines].sort((a, b) => a.dash - b.dash).map((line) => line.kind))];
    return kinds.map((kind) => {
      const some = lines.filter((line) => line.kind === kind);
      if (!kind) return { label: `${some.length} lines`, sample: null, lines: some };
      return { label: kind, sample: { colour: 5, dash: some[0].dash }, lines: some };
    });
  }

  _keyEntries() {
    this._parts = this._keyParts();
    this._unnamed = this._model.lines.length > NAMED;
    const labels = this._parts.map(({ label, sample }) => `${label} ${sample?.colour} ${sample?.dash}`).join("|");
    if (this._labels === labels) return;
    this._labels = labels;
    this._key.replaceChildren(...this._parts.map(({ label, sample }) => make("li", {}, [
      sampleOf(sample), make("span", { text: label }), make("output")])));
    this._nearEntry = make("li", { class: "near" });
    this._nearOf = null;
    if (this._unnamed) this._key.append(this._nearEntry);
  }

  _values() {
    const x = this._at ?? this._now ?? null;
    this._parts.forEach(({ lines }, index) => setText(this._key.children[index].lastElementChild, this._range(lines, x)));
    if (!this._unnamed) return;
    if (this._nearOf !== this._near) {
      this._nearOf = this._near;
      this._nearEntry.replaceChildren(...(this._near ? [sampleOf(this._near), make("span", { text: this._near.label }), make("output")] : []));
    }
    if (this._near) setText(this._nearEntry.lastElementChild, this._range([this._near], x));
  }

  _paint() {
    const context = clearedContext(this._canvas, this._width, HEIGHT);
    context.font = "12px system-ui, sans-serif";
    this._axes(context);
    context.save();
    context.beginPath();
    context.rect(LEFT - 1, this._top - 4, this._width - LEFT - RIGHT + 2, HEIGHT - this._top - BOTTOM + 8);
    context.clip();
    const budget = Math.max(40, Math.floor(POINTS / Math.max(1, this._model.lines.length)));
    for (const line of this._model.lines) if (line.band) this._band(context, line);
    for (const line of this._model.lines) this._line(context, line, budget);
    if (this._near) this._line(context, this._near, budget);
    context.restore();
    this._marks(context);
  }

  _y(value) {
    const { low, high } = this._model;
    return HEIGHT - BOTTOM - ((value - low) / (high - low || 1)) * (HEIGHT - this._top - BOTTOM);
  }

  _axes(context) {
    const { low, high, xEnd, xText, xTicks, yText } = this._model;
    context.fillStyle = this._palette.muted;
    context.strokeStyle = this._palette.line;
    context.lineWidth = 1;
    context.setLineDash([]);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of niceTicks(low, high, 3)) {
      const y = Math.round(this._y(tick)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(this._width - RIGHT, y);
      context.stroke();
      context.fillText(yText(tick), LEFT - 6, y);
    }
    context.textBaseline = "top";
    const count = Math.max(2, Math.floor((this._width - LEFT) / 110));
    for (const tick of xTicks(xEnd, count)) {
      const x = this._pixel(tick);
      context.textAlign = x > this._width - RIGHT - 20 ? "right" : "center";
      context.fillText(xText(tick), x, HEIGHT - BOTTOM + 8);
    }
  }

  _line(context, line, budget) {
    const { points } = line;
    if (!points.length) return;
    context.strokeStyle = this._palette[`line-${line.colour}`] ?? this._palette.ink;
    context.lineWidth = line === this._near ? 3.5 : line.width ?? 2;
    context.globalAlpha = this._model.lines.length > NAMED && line !== this._near ? 0.7 : 1;
    context.setLineDash(DASHES[line.dash] ?? []);
    context.beginPath();
    if (line.level) {
      context.moveTo(LEFT, this._y(points[0][1]));
      context.lineTo(this._width - RIGHT, this._y(points[0][1]));
    } else {
      const stride = Math.max(1, points.length / Math.min(budget, 2 * this._width));
      let first = 0;
      for (let next = 1; next <= points.length; next += 1) {
        if (next < points.length && points[next][2] === undefined) continue;
        this._piece(context, points.slice(first, next), stride);
        first = next;
      }
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  _band(context, { band, colour }) {
    context.fillStyle = this._palette[`line-${colour}`] ?? this._palette.ink;
    context.globalAlpha = 0.15;
    context.beginPath();
    for (const [x, low] of band) context.lineTo(this._pixel(x), this._y(low));
    for (const [x, , high] of [...band].reverse()) context.lineTo(this._pixel(x), this._y(high));
    context.fill();
    context.globalAlpha = 1;
  }

  // A line without a gap in it.
  _piece(context, points, stride) {
    const [x, y] = [this._pixel(points[0][0]), this._y(points[0][1])];
    context.moveTo(x, y);
    for (let place = 0; place < points.length; place += stride) this._extremes(context, points, place, stride);
    const [endX, endY] = points.at(-1);
    context.lineTo(this._pixel(endX), this._y(endY));
    if (points.length === 1) context.arc(x, y, 2, 0, 7);
  }

  // Of the points that share a place on the screen, the lowest and the highest are drawn: a spike stays visible.
  _extremes(context, points, place, stride) {
    const [first, last] = [Math.floor(place), Math.min(points.length, Math.max(Math.floor(place) + 1, Math.floor(place + stride)))];
    let [low, high] = [first, first];
    for (let index = first + 1; index < last; index += 1) {
      if (points[index][1] < points[low][1]) low = index;
      if (points[index][1] > points[high][1]) high = index;
    }
    for (const index of low < high ? [low, high] : low > high ? [high, low] : [low]) {
      context.lineTo(this._pixel(points[index][0]), this._y(points[index][1]));
    }
  }

  _marks(context) {
    context.setLineDash([]);
    let taken = -Infinity;
    for (const { x, kind, chosen } of this._model.marks) {
      const place = this._pixel(x);
      if (place - taken < 2 && !chosen) continue;
      taken = place;
      context.strokeStyle = this._palette[markOf(kind)[1]];
      context.globalAlpha = chosen ? 1 : 0.35;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(place, this._top - 4);
      context.lineTo(place, HEIGHT - BOTTOM);
      context.stroke();
    }
    context.globalAlpha = 1;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.font = "600 11px system-ui, sans-serif";
    for (const stack of this._stacks) this._stack(context, stack);
  }

  // One above the other: the shape of each kind, and how many there are of it.
  _stack(context, { place, rows, left }) {
    rows.forEach(({ kind, count, chosen }, row) => {
      const [shape, colour] = markOf(kind);
      const y = this._top - 12 - ROW * row;
      context.strokeStyle = this._palette[colour];
      context.fillStyle = this._palette[colour];
      context.lineWidth = 2;
      drawMark(context, shape, place, y, chosen ? 6 : 4.5);
      if (count > 1) context.fillText(String(count), place + 7, y);
    });
    context.fillStyle = this._palette.ink;
    if (left) context.fillText(`+${left}`, place - 4, this._top - 12 - ROW * rows.length);
  }
}
