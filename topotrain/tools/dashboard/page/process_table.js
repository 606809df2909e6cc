// A table of the processes: state, place, step, speed, memory, and a way to the log of each.

import { byId, make, metricText, numberText, setText } from "./elements.js";
import { SILENT, STATES } from "./job_view.js";

const EVERY_MS = 250;

/** The table of one job at one moment. */
export class ProcessTable {
  constructor(onSelect) {
    this._body = byId("process-rows");
    this._onSelect = onSelect;
    this._rows = new Map();
    this._shown = new Map();
    this._body.addEventListener("click", (event) => this._clicked(event));
    this._body.addEventListener("keydown", (event) => this._moved(event));
  }

  /** Show a job at a moment, now or soon. */
  update(view, t) {
    this._next = () => this._show(view, t);
    if (this._timer === undefined) this._turn();
  }

  // A browser lays out a whole table for each cell that changes, which is too much for each frame of a replay.
  _turn() {
    const next = this._next;
    this._next = undefined;
    this._timer = next && setTimeout(() => this._turn(), EVERY_MS);
    next?.();
  }

  _show(view, t) {
    if (this._view !== view || this._layout !== view.layoutVersion) this._rebuild(view);
    for (const process of view.processes) this._updateRow(process, view, t);
  }

  _rebuild(view) {
    this._view = view;
    this._layout = view.layoutVersion;
    this._shown.clear();
    this._rows = new Map(view.processes.map((process, index) => [process.name, this._row(process, index)]));
    this._body.replaceChildren(...this._rows.values());
  }

  _row(process, index) {
    const { name, host, unit } = process;
    const place = [host, unit === null || unit === undefined ? null : `unit ${unit}`].filter(Boolean).join(" · ");
    // One stop for Tab, and the arrow keys go on from there: there may be hundreds.
    const log = make("button", { type: "button", "data-process": name, "aria-label": `Log of ${name}`, text: "Log",
      tabindex: index ? "-1" : "0" });
    return make("tr", {}, [make("th", { scope: "row", text: name }), make("td"), make("td", { text: place }),
      make("td"), make("td"), make("td"), make("td", {}, [log])]);
  }

  _updateRow({ name, role }, view, t) {
    const state = view.stateAt(name, t);
    const away = state === "dead" || state === "away";
    const step = (view.pointAt(name, "loss", t) ?? view.pointAt(name, "samples_per_s", t))?.[1];
    const rate = SILENT.has(state) ? null : view.valueAt(name, role === "worker" ? "samples_per_s" : "updates_per_s", t);
    const memory = away ? null : view.valueAt(name, "memory_bytes", t);
    const key = `${state}|${step}|${rate}|${memory}`;
    if (this._shown.get(name) === key) return;
    this._shown.set(name, key);
    const { cells } = this._rows.get(name);
    setText(cells[1], STATES[state]);
    setText(cells[3], step > 0 ? numberText(step) : "–");
    setText(cells[4], rate === null ? "–" : `${numberText(rate)} ${role === "worker" ? "samples/s" : "updates/s"}`);
    setText(cells[5], metricText("memory_bytes", memory));
  }

  _clicked(event) {
    const { process } = event.target.dataset;
    if (process) this._onSelect(process);
  }

  _moved(event) {
    const row = event.target.closest("tr");
    const next = { ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling }[event.key];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    const button = next.querySelector("button");
    button.tabIndex = 0;
    button.focus();
  }
}
