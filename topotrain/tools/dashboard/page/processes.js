// The processes of a job at one moment: a map with hosts and units as boxes, a table with their figures, and one in detail.

import { arrowKeys, byId, make, numberText, setText } from "./elements.js";
import { STATES } from "./job_view.js";

/** Up to so many processes each has its name, state and figure in words; up to the second number its name. */
const IN_WORDS = 16;
const WITH_NAMES = 64;
const FIGURES = 7;
const LOG_EVERY_MS = 2000;

/** Where a process is, in words. */
function placeOf({ host, unit }) {
  return [host, Number.isInteger(unit) ? `unit ${unit}` : null].filter(Boolean).join(" · ");
}

// One stop for Tab, and the arrow keys go on from there: there may be hundreds.
function boxOf({ role, name, group, index }, number) {
  return make("button", { type: "button", class: "process", "data-role": role, "data-name": name, "aria-pressed": "false",
    tabindex: number ? "-1" : "0" }, [
    make("span", { class: "shape", "aria-hidden": "true" }),
    make("span", { class: "name" }, [make("span", { class: "role-name", text: `${role} ` }), `${group}/${index}`]),
    make("span", { class: "state-name" }),
    make("span", { class: "figure" }),
    make("span", { class: "slow-sign", text: "slow" }),
  ]);
}

function rowOf(process, number) {
  const { name } = process;
  const log = make("button", { type: "button", "data-process": name, "aria-label": `Log of ${name}`, text: "Log",
    tabindex: number ? "-1" : "0" });
  return make("tr", {}, [make("th", { scope: "row", text: name }), make("td", { text: placeOf(process) }),
    ...Array.from({ length: FIGURES }, () => make("td")), make("td", {}, [log])]);
}

/** Map and table. onSelect is called with the name of a process, or null. */
export class Processes {
  constructor(onSelect) {
    this._map = byId("map-area");
    this._rows = byId("process-rows");
    this._boxes = new Map();
    this._selected = null;
    byId("map-legend").prepend(...Object.entries(STATES).map(([state, text]) => (
      make("li", { "data-state": state }, [make("span", { class: "shape", "aria-hidden": "true" }), text]))));
    this._map.addEventListener("click", (event) => {
      const name = event.target.closest(".process")?.dataset.name;
      if (name) onSelect(name === this._selected ? null : name);
    });
    this._rows.addEventListener("click", ({ target }) => target.dataset.process && onSelect(target.dataset.process));
    arrowKeys(this._map, ".process");
    arrowKeys(this._rows, "button");
  }

  update(view, t) {
    if (this._view !== view || this._layout !== view.layoutVersion) this._rebuild(view);
    const slow = view.stragglersAt(t);
    view.processes.forEach((process, index) => {
      const { state, step, speed, loss, waits, staleness, memory } = view.figuresAt(process, t);
      this._updateBox(process.name, state, speed, slow.get(process.name));
      const texts = [STATES[state], step > 0 ? step.toLocaleString("en") : "–", speed, numberText(loss),
        numberText(100 * waits, " %"), numberText(staleness), numberText(memory, "B")];
      texts.forEach((text, place) => setText(this._rows.children[index].children[place + 2], text));
    });
  }

  select(name) {
    this._boxes.get(this._selected)?.setAttribute("aria-pressed", "false");
    this._selected = name;
    this._boxes.get(name)?.setAttribute("aria-pressed", "true");
  }

  focus(name) {
    this._boxes.get(name)?.focus();
  }

  _rebuild(view) {
    this._view = view;
    this._layout = view.layoutVersion;
    const focused = this._map.contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
    const count = view.processes.length;
    this._map.dataset.density = count <= IN_WORDS ? "words" : count <= WITH_NAMES ? "names" : "signs";
    this._boxes = new Map(view.processes.map((process, number) => [process.name, boxOf(process, number)]));
    const hosts = Map.groupBy(view.processes, (one) => one.host ?? "host");
    this._map.replaceChildren(...[...hosts].map(([host, some]) => this._hostBox(host, some)));
    this._rows.replaceChildren(...view.processes.map(rowOf));
    this.focus(focused);
    this.select(this._selected);
  }

  _hostBox(host, processes) {
    const units = [...Map.groupBy(processes, (one) => one.unit ?? -1)].sort(([a], [b]) => a - b);
    return make("div", { class: "host" }, [make("h3", { class: "host-name", text: host }),
      make("div", { class: "units" }, units.map(([number, some]) => this._unitBox(number, some)))]);
  }

  _unitBox(number, processes) {
    const roles = [...Map.groupBy(processes, (one) => one.role).values()];
    const residents = roles.map((some) => make("div", { class: "residents" }, some.map((one) => this._boxes.get(one.name))));
    return make("div", { class: "unit" }, [make("span", { class: "unit-name", text: number < 0 ? "" : `unit ${number}` }), ...residents]);
  }

  _updateBox(name, state, speed, slow) {
    const figure = speed === "–" ? "" : speed;
    const words = [name, STATES[state], figure, slow ? `slow: ${slow.toFixed(1)} × the median` : ""].filter(Boolean).join(", ");
    const box = this._boxes.get(name);
    if (box.title === words) return;
    box.title = words;
    box.setAttribute("aria-label", words);
    box.dataset.state = state;
    box.toggleAttribute("data-slow", Boolean(slow));
    setText(box.querySelector(".state-name"), STATES[state]);
    setText(box.querySelector(".figure"), figure);
  }
}

/** The panel of the selected process. readLog gives the last lines of a log, or null. */
export class ProcessDetails {
  constructor(readLog, onClose) {
    this._readLog = readLog;
    this._panel = byId("details");
    this._name = null;
    byId("details-close").addEventListener("click", () => onClose());
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this._name !== null && onClose());
  }

  /** Show a process of a job, or none. */
  select(view, name) {
    this._name = name;
    this._panel.hidden = name === null;
    byId("details-log").hidden = true;
    setText(byId("details-log-text"), "");
    if (name === null) return;
    setText(byId("details-title"), name);
    this._slices = null;
    this.update(view);
    this._showLog();
  }

  /** Show what is new of the process: its number after another start, and a server's slices, which come after its start. */
  update(view) {
    const process = view.processes.find((one) => one.name === this._name);
    if (process === undefined) return;
    const { pid, slices = [] } = process;
    setText(byId("details-place"), [placeOf(process), pid ? `process ${pid}` : ""].filter(Boolean).join(" · "));
    if (this._slices?.length === slices.length) return;
    this._slices = slices;
    byId("details-slices").hidden = slices.length === 0;
    byId("details-slice-rows").replaceChildren(...slices.map((slice) => make("tr", {}, [make("td", { text: slice.name }),
      make("td", { text: numberText(slice.first) }), make("td", { text: numberText(slice.count) })])));
  }

  /** Read the log again. Called when the server has just sent something of a running job: so it is still there. */
  refresh() {
    if (this._name !== null && performance.now() - this._readAt >= LOG_EVERY_MS) this._showLog();
  }

  async _showLog() {
    const name = this._name;
    this._readAt = performance.now();
    const text = await this._readLog(name);
    if (this._name !== name) return;
    byId("details-log").hidden = text === null;
    const area = byId("details-log-text");
    const atEnd = area.scrollTop + area.clientHeight >= area.scrollHeight - 4;
    setText(area, text || "(nothing yet)");
    if (atEnd) area.scrollTop = area.scrollHeight;
  }
}
