// The map: processes as buttons in the boxes of their units and hosts, connections on a canvas below them.

import { byId, bytesText, clearedContext, drawTag, make, numberText, readPalette, setAttribute, setText }
  from "./elements.js";
import { SILENT, STATES } from "./job_view.js";
import { alongCurve, buildBoxes, ConnectionGeometry } from "./map_layout.js";

/** A line is this wide at most, in pixels, and at least 1. */
const WIDEST = 8;
/** Up to so many connections have their bytes per second in words. */
const LABELLED = 6;
/** With more connections than these, those without traffic are left out, and the others are thinner and paler. */
const MANY = 300;
const REDRAW_MS = 100;
const WIDTH_CLASSES = 8;

/** The map of one job at one moment. */
export class MapView {
  constructor(onSelect) {
    this._area = byId("map-area");
    this._canvas = make("canvas", { class: "connections", "aria-hidden": "true" });
    this._area.append(make("div", { class: "hosts" }), this._canvas);
    this._onSelect = onSelect;
    this._buttons = new Map();
    this._shown = new Map();
    this._shownStates = new Map();
    this._selected = null;
    this._layout = null;
    this._drawnAt = -Infinity;
    this._palette = readPalette();
    this._area.addEventListener("click", (event) => this._clicked(event));
    this._area.addEventListener("keydown", (event) => this._moved(event));
    this._area.addEventListener("focusin", (event) => this._focused(event));
    new ResizeObserver(() => this._measure()).observe(this._area);
    this._legend();
  }

  /** Show a job at a moment. */
  update(view, t) {
    const rebuilt = this._view !== view || this._layout !== view.layoutVersion;
    if (rebuilt) this._rebuild(view);
    this._t = t;
    const slow = view.stragglersAt(t);
    for (const process of view.processes) this._updateProcess(process, t, slow.get(process.name));
    // Behind the words in the boxes, which make them as high as they are.
    if (rebuilt) this._measure();
    const now = performance.now();
    if (now - this._drawnAt >= REDRAW_MS) this._draw();
    else this._later ??= setTimeout(() => this._draw(), REDRAW_MS);
  }

  /** Mark a process as the selected one; null: none. */
  select(name) {
    this._buttons.get(this._selected)?.setAttribute("aria-pressed", "false");
    this._selected = name;
    this._buttons.get(name)?.setAttribute("aria-pressed", "true");
    this._draw();
  }

  /** Move the keyboard's focus to a process. */
  focus(name) {
    this._buttons.get(name)?.focus();
  }

  /** Read the colours again, after the theme has changed. */
  recolour() {
    this._palette = readPalette();
    this._draw();
  }

  // Find the places of all boxes again.
  _measure() {
    if (!this._view) return;
    this._geometry = new ConnectionGeometry(this._area, this._buttons, this._view.connections);
    this._draw();
  }

  _rebuild(view) {
    this._view = view;
    this._layout = view.layoutVersion;
    this._shown.clear();
    const focused = document.activeElement?.dataset?.name;
    this._buttons = buildBoxes(this._area, view.processes);
    const first = this._buttons.get(focused) ?? this._buttons.values().next().value;
    if (first) first.tabIndex = 0;
    if (focused) this.focus(focused);
    this._buttons.get(this._selected)?.setAttribute("aria-pressed", "true");
  }

  _updateProcess(process, t, slow) {
    const { name, role } = process;
    const view = this._view;
    const state = view.stateAt(name, t);
    this._shownStates.set(name, state);
    const rate = role === "worker" ? view.valueAt(name, "samples_per_s", t) : view.valueAt(name, "updates_per_s", t);
    const quiet = rate === null || SILENT.has(state);
    const figure = quiet ? "" : `${numberText(rate)} ${role === "worker" ? "samples/s" : "updates/s"}`;
    const late = slow ? `slow: ${slow.toFixed(1)} × the median` : "";
    const key = `${state}|${figure}|${late}`;
    if (this._shown.get(name) === key) return;
    this._shown.set(name, key);
    const button = this._buttons.get(name);
    button.dataset.state = state;
    setAttribute(button, "data-slow", slow ? "" : null);
    setText(button.querySelector(".state-name"), STATES[state]);
    setText(button.querySelector(".figure"), figure);
    const words = [name, STATES[state], figure, late].filter(Boolean).join(", ");
    button.setAttribute("aria-label", words);
    button.title = words;
  }

  _clicked(event) {
    const button = event.target.closest(".process");
    if (button) this._onSelect(button.dataset.name === this._selected ? null : button.dataset.name);
  }

  _focused(event) {
    const button = event.target.closest(".process");
    if (!button) return;
    for (const other of this._area.querySelectorAll('.process[tabindex="0"]')) other.tabIndex = -1;
    button.tabIndex = 0;
  }

  _moved(event) {
    const here = this._geometry?.places.get(document.activeElement?.dataset?.name);
    const aims = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    const aim = aims[event.key];
    if (event.key === "Escape" && this._selected) this._onSelect(null);
    if (!here || !aim) return;
    event.preventDefault();
    let best = null;
    for (const [name, place] of this._geometry.places) {
      const [dx, dy] = [place.x - here.x, place.y - here.y];
      const ahead = dx * aim[0] + dy * aim[1];
      // What lies aside counts more than what lies ahead, so that arrows stay in a row.
      const cost = ahead + 3 * Math.abs(dx * aim[1] + dy * aim[0]);
      if (ahead > 1 && (!best || cost < best.cost)) best = { name, cost };
    }
    if (best) this.focus(best.name);
  }

  _draw() {
    clearTimeout(this._later);
    this._later = undefined;
    this._drawnAt = performance.now();
    if (!this._geometry || !this._view || this._t === undefined) return;
    const { width, height, curves } = this._geometry;
    const { connections } = this._view;
    this._traffic = this._view.trafficAt(this._t);
    const most = this._mostTraffic();
    const classes = new Map();
    const keys = connections.map((one, index) => {
      const style = curves[index] && this._style(one, this._traffic[index], most);
      if (!style) return "";
      const key = `${style.colour} ${style.width} ${style.alpha}`;
      if (!classes.has(key)) classes.set(key, { style, indexes: [] });
      classes.get(key).indexes.push(index);
      return key;
    }).join();
    setText(byId("map-note"), this._note(most));
    // Thousands of lines take long, and mostly they are those of the last time.
    if (connections.length > MANY && this._drawnKeys === keys && this._drawnOn === this._geometry) return;
    [this._drawnKeys, this._drawnOn] = [keys, this._geometry];
    const context = clearedContext(this._canvas, width, height);
    const sorted = [...classes.values()].sort((a, b) => a.style.front - b.style.front);
    for (const { style, indexes } of sorted) this._stroke(context, style, indexes.map((index) => curves[index]));
    this._labels(context);
  }

  _style({ from, to }, traffic, most) {
    const count = this._view.connections.length;
    const many = count > MANY;
    const mine = this._selected === from || this._selected === to;
    const faint = this._buttons.has(this._selected) && !mine;
    // Of thousands of connections only a haze is seen; the selected process has its own in front of it.
    const pale = (alpha) => (many && !mine ? Math.max(0.05, (alpha * MANY) / count) : faint ? alpha * 0.3 : alpha);
    if (this._shownStates.get(from) === "dead" || this._shownStates.get(to) === "dead") {
      return { colour: "bad", width: 1.5, dash: [2, 5], alpha: many ? pale(0.9) * 3 : pale(0.9), front: 1 };
    }
    if (traffic <= 0) {
      return many && !mine ? null : { colour: "idle", width: 1, dash: [5, 5], alpha: pale(0.8), front: 0 };
    }
    // Lines of one pixel, which a browser draws many times faster than wider ones.
    if (many && !mine) return { colour: "flow", width: 1, dash: [], alpha: pale(0.85), front: 2 };
    const share = Math.ceil(Math.sqrt(traffic / most) * WIDTH_CLASSES) / WIDTH_CLASSES;
    const wide = 1 + Math.min(1, share) * (WIDEST - 1);
    return { colour: mine ? "accent" : "flow", width: wide, dash: [], alpha: pale(0.85), front: mine ? 3 : 2 };
  }

  _stroke(context, style, curves) {
    context.globalAlpha = style.alpha;
    context.strokeStyle = this._palette[style.colour];
    context.lineWidth = style.width;
    context.setLineDash(style.dash);
    context.beginPath();
    for (const [x0, y0, x1, y1, x2, y2, x3, y3] of curves) {
      context.moveTo(x0, y0);
      if (x0 === x1 && y0 === y1) context.lineTo(x3, y3);
      else context.bezierCurveTo(x1, y1, x2, y2, x3, y3);
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  _labels(context) {
    const { connections } = this._view;
    const all = connections.map((one, index) => [one, index]);
    const mine = all.filter(([one]) => one.from === this._selected || one.to === this._selected);
    const named = mine.length ? mine : all;
    if (named.length > LABELLED) return;
    named.forEach(([, index], order) => {
      const traffic = this._traffic[index];
      const curve = this._geometry.curves[index];
      if (!curve || traffic <= 0) return;
      // Not all at the middle, where connections cross.
      const [x, y] = alongCurve(curve, named.length === 1 ? 0.5 : 0.3 + (0.4 * order) / (named.length - 1));
      drawTag(context, this._palette, bytesText(traffic, "B/s"), x, y);
    });
  }

  _mostTraffic() {
    const most = this._traffic.reduce((high, one) => Math.max(high, one), 1);
    this._peak = Math.max(most, (this._peak ?? 1) * 0.98);
    return this._peak;
  }

  _note(most) {
    const { processes, connections } = this._view;
    if (!processes.length) return "The layout is not known yet.";
    const widest = most > 1 ? `; the widest line is ${bytesText(most, "B/s")}` : "";
    return `${processes.length} processes, ${connections.length} connections${widest}.`;
  }

  _legend() {
    const entries = Object.entries(STATES).map(([state, label]) => make("li", { "data-state": state },
      [make("span", { class: "shape", "aria-hidden": "true" }), label]));
    const slow = make("li", { "data-slow": "" }, [make("span", { class: "slow-sign", text: "slow" }), "behind the median"]);
    byId("map-legend").append(...entries, slow);
  }
}
