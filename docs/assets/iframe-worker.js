// Material searches in a Worker, which browsers refuse to pages that were opened from a folder.
// There the worker's script runs in a hidden frame instead. Its name tells Material not to load its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write(`<script>
        postMessage = data => parent.dispatchEvent(
          new CustomEvent("from-worker", { detail: { frame: window, data } }))
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script")
          script.src = url
          script.onload = done
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><script src="${url}"><\/script>`)
      this.ready = new Promise(done => this.frame.addEventListener("load", done, { once: true }))
      inside.document.close()
      window.addEventListener("from-worker", event => {
        if (event.detail.frame === inside)
          this.dispatchEvent(new MessageEvent("message", { data: event.detail.data }))
      })
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
