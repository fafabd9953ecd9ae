// Save a trace that lies in the page. A link with a data: address would do it without a script, but browsers cut those at 2 MB.
(function () {
  "use strict";
  document.querySelectorAll("button[data-trace]").forEach(function (button) {
    button.addEventListener("click", function () {
      var text = atob(JSON.parse(document.getElementById(button.getAttribute("data-trace")).textContent));
      var bytes = new Uint8Array(text.length);
      for (var at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
      var link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([bytes], { type: "application/gzip" }));
      link.download = button.getAttribute("data-name");
      link.click();
      setTimeout(function () { URL.revokeObjectURL(link.href); }, 10000);
    });
  });
})();
