"use strict";
// Names come from outside: they are only ever written with textContent and setAttribute.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const fixed = (value, digits) => value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1"); // no minus before zeros
  const percent = (value, digits = 2) => fixed(100 * value, digits);
  const hide = (selector, when) => {
    for (const element of all(selector)) element.classList.toggle("off", when(element));
  };
  // Call `apply` now and whenever one of the elements changes.
  const follow = (elements, apply, event = "change") => {
    for (const element of elements) element.addEventListener(event, apply);
    apply();
  };

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
      for (const box of boxes) hide(`[data-method="${box.dataset.shows}"]`, () => !box.checked);
      if (status) status.textContent = `${boxes.filter((box) => box.checked).length} of ${boxes.length} methods shown`;
    };
    follow(boxes, apply);
  }

  function lastBin() {
    const box = byId("drop-last");
    follow([box], () => hide("[data-last-bin]", (element) => (element.dataset.lastBin === "kept") === box.checked));
  }

  function choosers() {
    for (const select of all("[data-chooses]"))
      follow([select], () => hide(`[data-of="${select.id}"]`, (element) => element.dataset.index !== select.value));
  }

  // Columns of data.methods[m].classes: class, samples, off, claims, right, gap, band low and high, ECE.
  function classes() {
    const search = byId("class-search"), everything = byId("class-all");
    if (!search) return;
    const nameOf = (k) => (data.names ? data.names[k] : `class ${k}`);
    const known = (value, digits = 1) => (value === null ? "unknown" : value.toFixed(digits));
    const byName = new Intl.Collator(undefined, { numeric: true }); // class 9 before class 10
    const drawn = document.querySelector("[data-class-rows] tr");
    const made = ([k, count, off, claims, right, gap, low, high, ece], widest) => {
      const row = drawn.cloneNode(true), length = gap === null || !widest ? 0 : 48 * gap / widest, size = Math.abs(length);
      const told = gap === null ? "" : `${gap >= 0.05 ? "+" : ""}${fixed(gap, 1)}`;
      const span = low !== null ? `${known(low)} to ${known(high)}` : "";
      const texts = [nameOf(k), count.toLocaleString("en"), known(claims), known(right), told, null, span, known(ece, 2)];
      texts.forEach((text, i) => { if (text !== null) (row.cells[i].querySelector("bdi") ?? row.cells[i]).textContent = text; });
      if (off) {
        row.cells[4].replaceChildren(Object.assign(document.createElement("strong"), { textContent: told }),
          Object.assign(document.createElement("span"), { className: "sr", textContent: " (more than chance explains)" }));
      }
      const bar = row.querySelector("path");
      bar.setAttribute("d", `M${Math.min(50, 50 + length)} 2h${size}v10h${-size}Z`);
      bar.setAttribute("class", gap > 0 ? "over" : "under");
      return row;
    };
    const fill = (body, rows, worst) => {
      const wanted = search.value.trim().toLowerCase();
      let shown = rows.filter((row) => nameOf(row[0]).toLowerCase().includes(wanted));
      const { sort, up } = body.dataset;
      if (sort !== undefined) {
        const unknown = (row) => sort !== "0" && row[sort] === null; // comes last in either order
        const order = (a, b) => (sort === "0" ? byName.compare(nameOf(a[0]), nameOf(b[0])) : a[sort] - b[sort]);
        shown = [...shown].sort((a, b) => unknown(a) - unknown(b) || order(a, b) * (up ? 1 : -1));
      }
      if (!everything.checked) shown = shown.slice(0, worst);
      const widest = Math.max(...shown.map((row) => Math.abs(row[5] ?? 0)), 0);
      body.replaceChildren(...shown.map((row) => made(row, widest)));
      return `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} classes shown`;
    };
    const bodies = all("[data-class-rows]");
    const apply = () => {
      const told = bodies.map((body) => fill(body, data.methods[Number(body.dataset.classRows)].classes, 20));
      byId("class-shown").textContent = told[0]; // methods have the same classes
    };
    for (const body of bodies) {
      const heads = all("th[data-sort]", body.parentElement);
      for (const head of heads) {
        const button = Object.assign(document.createElement("button"), { type: "button", className: "sort", textContent: head.textContent });
        head.replaceChildren(button);
        button.addEventListener("click", () => {
          const same = body.dataset.sort === head.dataset.sort;
          body.dataset.up = same && !body.dataset.up ? "yes" : "";
          body.dataset.sort = head.dataset.sort;
          for (const other of heads) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", body.dataset.up ? "ascending" : "descending");
          apply();
        });
      }
    }
    search.addEventListener("input", apply);
    byId("class-csv").addEventListener("click", () => {
      const select = byId("class-method"), method = data.methods[Number(select ? select.value : 0)];
      const quote = (text) => `"${text.replaceAll('"', '""')}"`;
      const lines = method.classes.map(([k, ...numbers]) => [quote(nameOf(k)), ...numbers.map((value) => value ?? "")].join(","));
      const header = "class,samples,more_than_chance,claims,right,gap,perfect_low,perfect_high,one_vs_rest_ece";
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([[header, ...lines, ""].join("\n")], { type: "text/csv" }));
      link.download = "classes.csv";
      link.click();
      URL.revokeObjectURL(link.href);
    });
    follow([everything], apply);
  }

  function pair() {
    const before = byId("before"), after = byId("after");
    if (!before) return;
    const show = (row, value) => row.percent ? `${percent(value)} %` : fixed(value, 4);
    const change = (row, difference) => {
      const text = row.percent ? percent(difference) : fixed(difference, 4);
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
      for (const group of all("[data-pair]"))
        group.classList.toggle("before", group.dataset.pair === before.value && before.value !== after.value);
      hide("[data-pair]", (group) => ![before.value, after.value].includes(group.dataset.pair));
      hide("[data-after]", (band) => band.dataset.after !== after.value);
      const found = data.pairs[Number(before.value)][Number(after.value)];
      byId("pair-sentence").textContent = found === null
        ? `“${a.name}” and “${b.name}” cannot be compared sample by sample.`
        : `NLL of “${b.name}” minus that of “${a.name}”: ${fixed(found.nll[0], 4)} (95\u00a0% interval ` +
          `${fixed(found.nll[1], 4)} to ${fixed(found.nll[2], 4)}, paired by sample). ` +
          `${found.n_changed.toLocaleString("en")} of ${found.n.toLocaleString("en")} predicted classes differ${found.n_changed === 1 ? "s" : ""}.`;
    };
    follow([before, after], apply);
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
        const whole = (value) => Math.round(value).toLocaleString("en");  // weights need not be whole
        write("left", `abstains on ${whole(method.n - kept)}`);
        write("error", missed);
        write("wrong", `${whole(wrong)} of ${whole(kept)} wrong`);
        const x = left + width * coverage, y = top + height * (1 - Math.min(error, end) / end);
        chart.querySelector(`[data-method="${m}"] .dot`)
          .setAttribute("transform", kept ? `translate(${x.toFixed(1)} ${y.toFixed(1)})` : "translate(-99 -99)");
        words.push(`${method.name}: answers ${answered}, error ${missed}`);
      });
      slider.setAttribute("aria-valuetext", `at least ${shown.textContent}; ${words.join("; ")}`);
    };
    follow([slider], apply, "input");
  }

  // Say so where a table is wider than the page.
  function wide() {
    const apply = () => {
      for (const box of all(".scroll")) {
        const more = box.scrollWidth > box.clientWidth + 4, next = box.nextElementSibling;
        const hint = next && next.classList.contains("hint-more") ? next : null;
        box.classList.toggle("more", more);
        if (more && !hint)
          box.after(Object.assign(document.createElement("p"), { className: "hint-more", textContent: "Scroll sideways for more →" }));
        if (!more && hint) hint.remove();
      }
    };
    addEventListener("resize", apply);
    document.addEventListener("change", apply);
    document.addEventListener("toggle", apply, true);
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

  for (const part of [themes, methods, lastBin, choosers, classes, pair, threshold, printing, wide]) part();
})();
