"use strict";
// Puts the sections that the server sends into the page. All text in them was escaped there.

const main = document.querySelector("main");
const shown = new Map(); // name of a section: its HTML, as it was sent
for (const section of main.children) shown.set(section.dataset.section, null);

function formatClock(seconds) {
  const whole = Math.round(seconds);
  if (whole < 100) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  const two = (number) => String(number).padStart(2, "0");
  if (minutes < 60) return `${minutes} min ${two(whole % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

let arrived = performance.now();

function tick() {
  const passed = (performance.now() - arrived) / 1000;
  for (const span of document.querySelectorAll("[data-tick]")) {
    const seconds = Number(span.dataset.seconds);
    const now = span.dataset.tick === "up" ? seconds + passed : Math.max(0, seconds - passed);
    span.textContent = formatClock(now);
  }
}

function show(message) {
  arrived = performance.now();
  document.title = message.title;
  main.dataset.state = message.state;
  const names = new Set(message.sections.map(([name]) => name));
  for (const section of [...main.children]) {
    if (!names.has(section.dataset.section)) section.remove();
  }
  let place = main.firstElementChild;
  for (const [name, html] of message.sections) {
    let section = main.querySelector(`:scope > [data-section="${name}"]`);
    if (section === null) {
      section = document.createElement("div");
      section.dataset.section = name;
      shown.delete(name);
    }
    if (section !== place) main.insertBefore(section, place);
    else place = place.nextElementSibling;
    if (shown.get(name) !== html) {
      section.innerHTML = html;
      shown.set(name, html);
    }
  }
}

function setLost(lost) {
  let note = document.getElementById("lost");
  if (!lost) {
    if (note) note.remove();
    return;
  }
  if (note) return;
  note = document.createElement("div");
  note.id = "lost";
  note.setAttribute("role", "status");
  note.textContent = "No connection: this page goes on when the run does.";
  document.body.prepend(note);
}

const source = new EventSource("events");
source.onopen = () => setLost(false);
source.onmessage = (event) => show(JSON.parse(event.data));
source.onerror = () => {
  if (main.dataset.state !== "finished") setLost(true);
};
setInterval(tick, 1000);
