// Tables of configurations: a click on a heading sorts, boxes choose the schedules that are shown. Timelines: the
// pointer says what it is on.
"use strict";

(() => {
  const numberOf = (text) => /^~?[-\d]/.test(text) ? Number(text.replace("~", "")) : NaN; // "2bw" is none

  function compare(left, right) {
    const [a, b] = [numberOf(left), numberOf(right)];
    if (Number.isNaN(a) || Number.isNaN(b)) return left < right ? -1 : Number(left > right);
    return a - b;
  }

  function sortBy(table, heading) {
    const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const each of heading.parentElement.cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const textOf = (row, column) => row.cells[column].textContent;
    const byRank = (a, b) => compare(textOf(a, 0), textOf(b, 0));
    const rows = [...table.tBodies[0].rows].sort(
      (a, b) => sign * compare(textOf(a, heading.cellIndex), textOf(b, heading.cellIndex)) || byRank(a, b),
    );
    table.tBodies[0].append(...rows);
  }

  function makeSortable(table) {
    for (const heading of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => sortBy(table, heading));
      heading.append(button);
    }
    table.tHead.rows[0].cells[0].setAttribute("aria-sort", "ascending");
  }

  function makeFilter(table) {
    const column = [...table.tHead.rows[0].cells].findIndex((each) => each.textContent === "schedule");
    const rows = [...table.tBodies[0].rows];
    const scheduleOf = (row) => row.cells[column].textContent;
    const boxes = new Map();
    const choices = document.createElement("fieldset");
    const title = document.createElement("legend");
    const count = document.createElement("output");
    title.append("schedules");

    function show() {
      let shown = 0;
      for (const row of rows) {
        row.hidden = !boxes.get(scheduleOf(row)).checked;
        if (!row.hidden) shown += 1;
      }
      count.textContent = `${shown} of ${rows.length} rows`;
    }

    function addButton(text, checked) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(text);
      button.addEventListener("click", () => {
        for (const box of boxes.values()) box.checked = checked;
        show();
      });
      choices.append(button);
    }

    choices.append(title);
    addButton("all", true);
    addButton("none", false);
    for (const schedule of new Set(rows.map(scheduleOf))) {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = true;
      box.addEventListener("change", show);
      boxes.set(schedule, box);
      const number = rows.filter((row) => scheduleOf(row) === schedule).length;
      label.append(box, ` ${schedule} (${number})`);
      choices.append(label);
    }
    choices.append(count);
    table.parentElement.before(choices);
    show();
  }

  // Timelines: a box says what it is while the pointer rests on it. All that a picture knows of its boxes is in its
  // attributes: of each row a list of kind, stage, microbatch, weight version, distance from the one before, and width.
  function makeHovering(svg) {
    const { kinds, rows, top, pitch, left, second } = svg.dataset;
    const names = kinds.split(",");
    const boxes = rows.split("|").map((row) => {
      let x = 0;
      return row.split(";").filter(Boolean).map((text) => {
        const [kind, stage, microbatch, version, distance, width] = text.split(",");
        x += Number(distance);
        return { kind: names[kind], stage, microbatch, version, start: x, end: x + Number(width) };
      });
    });
    const seconds = (x) => ((x - left) / second).toPrecision(4);
    const words = (box) => `${box.kind} of microbatch ${box.microbatch}, stage ${box.stage}`
      + (box.version ? `, weights W${box.version}` : "") + `: ${seconds(box.start)} to ${seconds(box.end)} s`;
    svg.addEventListener("mousemove", (event) => {
      const place = svg.getBoundingClientRect();
      const unit = svg.viewBox.baseVal.width / place.width;
      const [x, y] = [(event.clientX - place.left) * unit, (event.clientY - place.top) * unit];
      const box = boxes[Math.floor((y - top) / pitch)]?.find((each) => each.start <= x && x < each.end);
      hover.hidden = !box;
      if (!box) return;
      hover.textContent = words(box);
      hover.style.left = `${Math.min(event.clientX + 12, innerWidth - hover.offsetWidth - 4)}px`;
      hover.style.top = `${event.clientY + 14}px`;
    });
    svg.addEventListener("mouseleave", () => { hover.hidden = true; });
  }

  const hover = document.createElement("div");
  hover.className = "hover";
  hover.hidden = true;
  document.body.append(hover);
  for (const svg of document.querySelectorAll("svg[data-rows]")) makeHovering(svg);

  for (const table of document.querySelectorAll("table.configurations")) {
    makeSortable(table);
    if (table.classList.contains("filtered")) makeFilter(table);
  }
})();
