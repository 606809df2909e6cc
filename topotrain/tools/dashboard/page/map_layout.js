// The boxes of the map: hosts, units and processes as elements, and the geometry of the connections between them.

import { make } from "./elements.js";

/** Up to so many processes each has its name, state and figure in words; up to the second number its name. */
const IN_WORDS = 16;
const WITH_NAMES = 64;
/** Up to so many connections are drawn as curves; more are straight, which costs a browser less. */
const CURVED = 400;

/** Group a list by a key, in the order of first appearance. */
function grouped(list, key) {
  const found = new Map();
  for (const one of list) {
    const name = key(one);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(one);
  }
  return found;
}

/** How much each process shows. */
export function density(count) {
  if (count <= IN_WORDS) return "words";
  return count <= WITH_NAMES ? "names" : "signs";
}

function processButton(process) {
  const short = `${process.group}/${process.index}`;
  return make("button", { type: "button", class: "process", "data-role": process.role, "data-name": process.name,
    "aria-pressed": "false", tabindex: "-1" }, [
    make("span", { class: "shape", "aria-hidden": "true" }),
    make("span", { class: "name" }, [make("span", { class: "role-name", text: `${process.role} ` }), short]),
    make("span", { class: "state-name" }),
    make("span", { class: "figure" }),
    make("span", { class: "slow-sign", text: "slow" }),
  ]);
}

function unitBox(number, processes, buttons) {
  const rows = ["worker", "server"].map((role) => {
    const some = processes.filter((one) => one.role === role);
    if (!some.length) return null;
    const row = make("div", { class: `residents ${role}s` });
    for (const process of some) {
      const button = processButton(process);
      buttons.set(process.name, button);
      row.append(button);
    }
    return row;
  });
  const name = make("span", { class: "unit-name", text: number === null ? "" : `unit ${number}` });
  return make("div", { class: "unit" }, [name, ...rows.filter(Boolean)]);
}

/** Build the boxes of all hosts into `area`; returns the buttons by the names of their processes. */
export function buildBoxes(area, processes) {
  const buttons = new Map();
  area.dataset.density = density(processes.length);
  const hosts = [...grouped(processes, (one) => one.host ?? "")].map(([host, some]) => {
    const units = [...grouped(some, (one) => one.unit ?? null)].sort(([a], [b]) => (a ?? 0) - (b ?? 0));
    const works = (members) => members.some((one) => one.role === "worker");
    // Units that only serve stand below the others, so that connections cross as little as they can.
    const rows = [units.filter(([, members]) => works(members)), units.filter(([, members]) => !works(members))];
    const boxes = rows.filter((row) => row.length).map((row) => make("div", { class: "units" },
      row.map(([number, members]) => unitBox(number, members, buttons))));
    return make("div", { class: "host" }, [make("h3", { class: "host-name", text: host || "host" }), ...boxes]);
  });
  area.querySelector(".hosts").replaceChildren(...hosts);
  return buttons;
}

/** Where a connection runs: four points of a curve, from the first process to the second. */
function curveBetween(a, b, curved) {
  const level = Math.abs(a.y - b.y) < (a.height + b.height) / 2;
  if (level) {
    const [y0, y1] = [a.y + a.height / 2, b.y + b.height / 2];
    // It stays inside the box of the host, whose lower edge leaves room for it.
    const sag = Math.min(44, 14 + Math.abs(a.x - b.x) / 10);
    return [a.x, y0, a.x + (b.x - a.x) * 0.2, y0 + sag, a.x + (b.x - a.x) * 0.8, y1 + sag, b.x, y1];
  }
  const down = a.y < b.y;
  const y0 = a.y + (down ? a.height : -a.height) / 2;
  const y1 = b.y - (down ? b.height : -b.height) / 2;
  if (!curved) return [a.x, y0, a.x, y0, b.x, y1, b.x, y1];
  const bend = (y1 - y0) * 0.45;
  return [a.x, y0, a.x, y0 + bend, b.x, y1 - bend, b.x, y1];
}

/** A point on a curve of `ConnectionGeometry`; share 0 is its start, 1 its end. */
export function alongCurve(curve, share) {
  const rest = 1 - share;
  const weights = [rest ** 3, 3 * rest ** 2 * share, 3 * rest * share ** 2, share ** 3];
  const sum = (offset) => weights.reduce((total, weight, index) => total + weight * curve[2 * index + offset], 0);
  return [sum(0), sum(1)];
}

/** The places of all processes and connections, in pixels of the map's area. */
export class ConnectionGeometry {
  constructor(area, buttons, connections) {
    const frame = area.getBoundingClientRect();
    this.width = frame.width;
    this.height = frame.height;
    this.places = new Map();
    for (const [name, button] of buttons) {
      const box = button.getBoundingClientRect();
      this.places.set(name, { x: box.left - frame.left + box.width / 2, y: box.top - frame.top + box.height / 2,
        width: box.width, height: box.height });
    }
    // Of a connection of a process that is not on the map there is none.
    this.curves = connections.map((one) => {
      const [a, b] = [this.places.get(one.from), this.places.get(one.to)];
      return a && b ? curveBetween(a, b, connections.length <= CURVED) : null;
    });
  }
}
