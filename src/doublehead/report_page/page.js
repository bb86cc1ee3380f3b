"use strict";
// Names come from outside: they are only ever written with textContent and setAttribute.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const percent = (value, digits = 2) => (100 * value).toFixed(digits);

  for (const element of all("[data-needs-script]")) element.hidden = false;

  function themes() {
    const button = byId("theme"), order = ["auto", "light", "dark"];
    let theme = "auto";
    try { theme = localStorage.getItem("doublehead-theme") || "auto"; } catch { /* storage may be forbidden */ }
    const apply = () => {
      if (theme === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = theme;
      button.textContent = `Theme: ${theme}`;
    };
    button.addEventListener("click", () => {
      theme = order[(order.indexOf(theme) + 1) % order.length];
      try { localStorage.setItem("doublehead-theme", theme); } catch { /* it then lasts as long as the page */ }
      apply();
    });
    if (!order.includes(theme)) theme = "auto";
    apply();
  }

  function methods() {
    const boxes = all("input[data-shows]"), status = byId("shown");
    const apply = () => {
      for (const box of boxes)
        for (const element of all(`[data-method="${box.dataset.shows}"]`))
          element.classList.toggle("off", !box.checked);
      if (status) status.textContent = `${boxes.filter((box) => box.checked).length} of ${boxes.length} methods shown`;
    };
    for (const box of boxes) box.addEventListener("change", apply);
    apply();
  }

  function lastBin() {
    const box = byId("drop-last");
    const apply = () => {
      for (const element of all("[data-last-bin]"))
        element.classList.toggle("off", (element.dataset.lastBin === "kept") === box.checked);
    };
    box.addEventListener("change", apply);
    apply();
  }

  function classes() {
    const select = byId("class-method");
    if (!select) return;
    const apply = () => {
      for (const element of all("[data-classes-of]"))
        element.classList.toggle("off", element.dataset.classesOf !== select.value);
    };
    select.addEventListener("change", apply);
    apply();
  }

  function pair() {
    const before = byId("before"), after = byId("after");
    if (!before) return;
    const show = (row, value) => row.percent ? `${percent(value)} %` : value.toFixed(4);
    const change = (row, difference) => {
      const text = row.percent ? percent(difference) : difference.toFixed(4);
      if (Number(text) === 0) return "no change";
      const better = row.better === 0 ? "" : row.better * difference > 0 ? " (better)" : " (worse)";
      return `${difference > 0 ? "+" : ""}${text}${better}`;
    };
    const apply = () => {
      const [a, b] = [before, after].map((select) => data.methods[Number(select.value)]);
      for (const row of data.rows) {
        byId(`before-${row.key}`).textContent = show(row, a.values[row.key]);
        byId(`after-${row.key}`).textContent = show(row, b.values[row.key]);
        byId(`change-${row.key}`).textContent = change(row, b.values[row.key] - a.values[row.key]);
      }
      for (const group of all("[data-pair]")) {
        group.classList.toggle("before", group.dataset.pair === before.value && before.value !== after.value);
        group.classList.toggle("off", ![before.value, after.value].includes(group.dataset.pair));
      }
      for (const band of all("[data-after]")) band.classList.toggle("off", band.dataset.after !== after.value);
      const found = data.pairs[Number(before.value)][Number(after.value)];
      byId("pair-sentence").textContent = found === null
        ? `${a.name} and ${b.name} were measured on different samples.`
        : `NLL of ${b.name} minus that of ${a.name}: ${found.nll[0].toFixed(4)} (95\u00a0% interval ` +
          `${found.nll[1].toFixed(4)} to ${found.nll[2].toFixed(4)}, paired by sample). ` +
          `${found.changed.toLocaleString("en")} of ${a.n.toLocaleString("en")} predicted classes differ.`;
    };
    before.addEventListener("change", apply);
    after.addEventListener("change", apply);
    apply();
  }

  function threshold() {
    const slider = byId("threshold"), shown = byId("threshold-value"), chart = byId("risk");
    const { left, width, top, height, end } = Object.fromEntries(
      Object.entries(chart.dataset).map(([key, value]) => [key, Number(value)]));
    const apply = () => {
      const i = Number(slider.value), at = data.thresholds[i], words = [];
      shown.textContent = `${percent(at, at > 0.99 ? 2 : at > 0.9 ? 1 : 0)} %`;
      data.methods.forEach((method, m) => {
        const kept = method.accepted[i], wrong = method.wrong[i];
        const coverage = kept / method.n, error = kept ? wrong / kept : NaN;
        const row = byId(`live-${m}`), write = (part, text) => { row.querySelector(`.${part}`).textContent = text; };
        const answered = `${percent(coverage, 1)} %`, missed = kept ? `${percent(error)} %` : "none answered";
        write("coverage", answered);
        write("left", `hands over ${(method.n - kept).toLocaleString("en")}`);
        write("error", missed);
        write("wrong", `${wrong.toLocaleString("en")} of ${kept.toLocaleString("en")} wrong`);
        const x = left + width * coverage, y = top + height * (1 - Math.min(error, end) / end);
        chart.querySelector(`[data-method="${m}"] .dot`)
          .setAttribute("transform", kept ? `translate(${x.toFixed(1)} ${y.toFixed(1)})` : "translate(-99 -99)");
        words.push(`${method.name}: answers ${answered}, error ${missed}`);
      });
      slider.setAttribute("aria-valuetext", `at least ${shown.textContent}; ${words.join("; ")}`);
    };
    slider.addEventListener("input", apply);
    apply();
  }

  function printing() {
    let opened = [];
    addEventListener("beforeprint", () => {
      opened = all("details.reading:not([open])");
      for (const element of opened) element.open = true;
    });
    addEventListener("afterprint", () => { for (const element of opened) element.open = false; });
  }

  for (const part of [themes, methods, lastBin, classes, pair, threshold, printing]) part();
})();
