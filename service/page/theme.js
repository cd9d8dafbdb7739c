// Light or dark. A classic script in <head>, so that a chosen theme is there before the first paint.
(() => {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  const chosen = () => {
    try {
      return localStorage.getItem("quire.theme");
    } catch {
      return null;
    }
  };
  /** The browser's own frame: in the page's theme, where that is not the system's. */
  const paintFrame = () => {
    const { theme } = root.dataset;
    for (const meta of document.querySelectorAll('meta[name="theme-color"]')) {
      meta.media = theme ? (meta.dataset.theme === theme ? "all" : "not all") : `(prefers-color-scheme: ${meta.dataset.theme})`;
    }
  };
  const choose = (theme) => {
    // Choosing what the system has anyway means following the system again.
    const follows = theme === (system.matches ? "dark" : "light");
    if (follows) delete root.dataset.theme;
    else root.dataset.theme = theme;
    paintFrame();
    try {
      if (follows) localStorage.removeItem("quire.theme");
      else localStorage.setItem("quire.theme", theme);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
  };

  const saved = chosen();
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;
  paintFrame();

  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const now = root.dataset.theme ?? (system.matches ? "dark" : "light");
      choose(now === "dark" ? "light" : "dark");
    });
  });
})();
