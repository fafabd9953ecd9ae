(function () {
  "use strict";
  var root = document.documentElement;

  // theme: the system's until the reader chooses
  var themeButton = document.getElementById("theme");
  function isDark() {
    var chosen = root.getAttribute("data-theme");
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function nameTheme() { themeButton.textContent = isDark() ? "Light theme" : "Dark theme"; }
  nameTheme();
  themeButton.addEventListener("click", function () {
    var next = isDark() ? "light" : "dark";
    root.setAttribute("data-theme", next);
    try { localStorage.setItem("fusion-advisor-theme", next); } catch (blocked) { /* stays for this view */ }
    nameTheme();
  });

  // the report's own data, as a file
  var save = document.getElementById("save-json");
  if (save) save.addEventListener("click", function () {
    var text = document.getElementById("report-json").textContent;
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "report.json";
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  });

  // tables that sort: numbers by data-v, words by their text
  function keyOf(row, column) {
    var cell = row.cells[column];
    var value = cell.getAttribute("data-v");
    return value === null ? cell.textContent.trim().toLowerCase() : Number(value);
  }
  document.querySelectorAll("table.sortable").forEach(function (table) {
    var body = table.tBodies[0];
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.appendChild(button);
      button.addEventListener("click", function () {
        var isDown = head.getAttribute("aria-sort") === "descending";
        var first = keyOf(body.rows[0], column);
        var descending = head.hasAttribute("aria-sort") ? !isDown : typeof first === "number" && head.classList.contains("n");
        Array.prototype.forEach.call(table.tHead.rows[0].cells, function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        Array.prototype.slice.call(body.rows).sort(function (a, b) {
          var left = keyOf(a, column), right = keyOf(b, column);
          var order = left < right ? -1 : left > right ? 1 : 0;
          return descending ? -order : order;
        }).forEach(function (row) { body.appendChild(row); });
      });
    });
  });

  // filter of the kernel table
  var filter = document.getElementById("filter");
  if (filter) filter.addEventListener("input", function () {
    var wanted = filter.value.trim().toLowerCase();
    var rows = document.getElementById("kernel-table").tBodies[0].rows;
    var shown = 0;
    Array.prototype.forEach.call(rows, function (row) {
      var matches = row.textContent.toLowerCase().indexOf(wanted) !== -1;
      row.hidden = !matches;
      if (matches) shown += 1;
    });
    document.getElementById("filter-count").textContent = wanted ? shown + " of " + rows.length + " kernels" : "";
  });

  // a printed page cannot unfold anything
  addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (item) { item.open = true; });
  });
})();
