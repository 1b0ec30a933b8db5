#!/usr/bin/env python3
"""A kubelet, as far as its address goes: it reads its kubeconfig when it starts, and never again, says that
it is well, and renews the lease of worker-1. It tells in kubelet.log with which server it started.

If `mute` names a part of that server, it renews nothing.
"""
import base64, datetime, http.client, http.server, json, pathlib, re, signal, ssl, sys, threading, time

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
root = pathlib.Path(flags["kubeconfig"].removesuffix("etc/kubernetes/kubelet.conf"))
text = pathlib.Path(flags["kubeconfig"]).read_text()
server, = re.findall(r"server: (\S+)", text)
authority, = re.findall(r"certificate-authority-data: (\S+)", text)
with open(root / "kubelet.log", "a") as log:
    log.write(server + "\n")


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


http.server.HTTPServer.allow_reuse_address = True
health = http.server.HTTPServer(("127.0.0.1", 10248), Health)
threading.Thread(target=health.serve_forever, daemon=True).start()

context = ssl.create_default_context(cadata=base64.b64decode(authority).decode())
context.load_cert_chain(root / "var/lib/kubelet/pki/kubelet-client-current.pem")
path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
host, port = server.removeprefix("https://").rsplit(":", 1)
while True:
    mute = root / "mute"
    if not (mute.exists() and mute.read_text() in server):
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {"spec": {"holderIdentity": "worker-1", "leaseDurationSeconds": 40, "renewTime": now}}
        try:
            api = http.client.HTTPSConnection(host, int(port), context=context, timeout=5)
            content = {"Content-Type": "application/merge-patch+json"}
            api.request("PATCH", path + "/worker-1", json.dumps(lease), content)
            if api.getresponse().status == 404:
                api.close()
                lease["metadata"] = {"name": "worker-1"}
                api.request("POST", path, json.dumps(lease), {"Content-Type": "application/json"})
                api.getresponse()
        except OSError:
            pass
    time.sleep(0.2)
