// The map: hosts, units and processes as boxes, each process with its state.

import { byId, make, numberText, setAttribute, setText } from "./elements.js";
import { SILENT, STATES } from "./job_view.js";

/** Up to so many processes each has its name, state and figure in words; up to the second number its name. */
const IN_WORDS = 16;
const WITH_NAMES = 64;

/** Group a list by a key, in the order of first appearance. */
function grouped(list, key) {
  const found = new Map();
  for (const one of list) {
    const name = key(one);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(one);
  }
  return [...found];
}

function processButton(process) {
  return make("button", { type: "button", class: "process", "data-role": process.role, "data-name": process.name,
    "aria-pressed": "false", tabindex: "-1" }, [
    make("span", { class: "shape", "aria-hidden": "true" }),
    make("span", { class: "name" }, [make("span", { class: "role-name", text: `${process.role} ` }), `${process.group}/${process.index}`]),
    make("span", { class: "state-name" }),
    make("span", { class: "figure" }),
    make("span", { class: "slow-sign", text: "slow" }),
  ]);
}

/** The map of one job at one moment. */
export class MapView {
  constructor(onSelect) {
    this._area = byId("map-area");
    this._onSelect = onSelect;
    this._buttons = new Map();
    this._shown = new Map();
    this._selected = null;
    this._area.addEventListener("click", (event) => this._clicked(event));
    this._area.addEventListener("keydown", (event) => this._moved(event));
    this._area.addEventListener("focusin", (event) => this._focused(event));
    const entries = Object.entries(STATES).map(([state, label]) => make("li", { "data-state": state },
      [make("span", { class: "shape", "aria-hidden": "true" }), label]));
    const slow = make("li", { "data-slow": "" }, [make("span", { class: "slow-sign", text: "slow" }), "behind the median"]);
    byId("map-legend").append(...entries, slow);
  }

  /** Show a job at a moment. */
  update(view, t) {
    if (this._view !== view || this._layout !== view.layoutVersion) this._rebuild(view);
    const slow = view.stragglersAt(t);
    for (const process of view.processes) this._updateProcess(process, t, slow.get(process.name));
  }

  /** Mark a process as the selected one; null: none. */
  select(name) {
    this._buttons.get(this._selected)?.setAttribute("aria-pressed", "false");
    this._selected = name;
    this._buttons.get(name)?.setAttribute("aria-pressed", "true");
  }

  /** Move the keyboard's focus to a process. */
  focus(name) {
    this._buttons.get(name)?.focus();
  }

  _rebuild(view) {
    this._view = view;
    this._layout = view.layoutVersion;
    this._shown.clear();
    const focused = this._area.contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
    const count = view.processes.length;
    this._area.dataset.density = count <= IN_WORDS ? "words" : count <= WITH_NAMES ? "names" : "signs";
    this._buttons = new Map(view.processes.map((process) => [process.name, processButton(process)]));
    this._area.replaceChildren(...grouped(view.processes, (one) => one.host ?? "").map((some) => this._hostBox(...some)));
    const first = this._buttons.get(focused) ?? this._buttons.values().next().value;
    if (first) first.tabIndex = 0;
    this.focus(focused);
    this.select(this._selected);
    setText(byId("map-note"), count ? `${count} processes.` : "The layout is not known yet.");
  }

  _hostBox(host, processes) {
    const units = grouped(processes, (one) => one.unit ?? null).sort(([a], [b]) => (a ?? 0) - (b ?? 0));
    return make("div", { class: "host" }, [make("h3", { class: "host-name", text: host || "host" }),
      make("div", { class: "units" }, units.map(([number, members]) => this._unitBox(number, members)))]);
  }

  _unitBox(number, processes) {
    const rows = grouped(processes, (one) => one.role).map(([role, some]) => (
      make("div", { class: `residents ${role}s` }, some.map((one) => this._buttons.get(one.name)))));
    return make("div", { class: "unit" }, [make("span", { class: "unit-name", text: number === null ? "" : `unit ${number}` }), ...rows]);
  }

  _updateProcess(process, t, slow) {
    const { name, role } = process;
    const state = this._view.stateAt(name, t);
    const rate = this._view.valueAt(name, role === "worker" ? "samples_per_s" : "updates_per_s", t);
    const key = `${state}|${rate}|${slow}`;
    if (this._shown.get(name) === key) return;
    this._shown.set(name, key);
    const quiet = rate === null || SILENT.has(state);
    const figure = quiet ? "" : `${numberText(rate)} ${role === "worker" ? "samples/s" : "updates/s"}`;
    const words = [name, STATES[state], figure, slow ? `slow: ${slow.toFixed(1)} × the median` : ""].filter(Boolean).join(", ");
    const button = this._buttons.get(name);
    button.dataset.state = state;
    setAttribute(button, "data-slow", slow ? "" : null);
    setText(button.querySelector(".state-name"), STATES[state]);
    setText(button.querySelector(".figure"), figure);
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
    if (event.key === "Escape" && this._selected) this._onSelect(null);
    const aim = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    const here = event.target.closest(".process");
    if (!here || !aim) return;
    event.preventDefault();
    const middle = (box) => [box.left + box.width / 2, box.top + box.height / 2];
    const [x, y] = middle(here.getBoundingClientRect());
    let best = null;
    for (const button of this._buttons.values()) {
      const place = middle(button.getBoundingClientRect());
      const [dx, dy] = [place[0] - x, place[1] - y];
      const ahead = dx * aim[0] + dy * aim[1];
      // What lies aside counts more than what lies ahead, so that arrows stay in a row.
      const cost = ahead + 3 * Math.abs(dx * aim[1] + dy * aim[0]);
      if (ahead > 1 && (!best || cost < best.cost)) best = { button, cost };
    }
    best?.button.focus();
  }
}
