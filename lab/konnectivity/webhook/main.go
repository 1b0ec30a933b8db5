// Command webhook is what an API server calls in a cluster: an admission webhook, which refuses objects whose
// name begins with "refused". Standard library only.
package main

import (
	"encoding/json"
	"flag"
	"log"
	"net/http"
	"strings"
)

var (
	listen = flag.String("listen", ":8443", "address to listen on")
	cert   = flag.String("cert", "", "certificate, PEM")
	key    = flag.String("key", "", "its key, PEM")
)

// The fields of admission.k8s.io/v1 that are needed here.
type review struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Request    *request  `json:"request,omitempty"`
	Response   *response `json:"response,omitempty"`
}

type request struct {
	UID  string `json:"uid"`
	Name string `json:"name"`
}

type response struct {
	UID     string  `json:"uid"`
	Allowed bool    `json:"allowed"`
	Status  *status `json:"status,omitempty"`
}

type status struct {
	Message string `json:"message"`
}

func main() {
	flag.Parse()
	http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	http.HandleFunc("/validate", validate)
	log.Fatal(http.ListenAndServeTLS(*listen, *cert, *key, nil))
}

func validate(w http.ResponseWriter, r *http.Request) {
	var asked review
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || asked.Request == nil {
		http.Error(w, "no AdmissionReview", http.StatusBadRequest)
		return
	}
	answer := &response{UID: asked.Request.UID, Allowed: !strings.HasPrefix(asked.Request.Name, "refused")}
	if !answer.Allowed {
		answer.Status = &status{Message: "a webhook in the user cluster refuses it"}
	}
	asked.Request, asked.Response = nil, answer
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(asked); err != nil {
		log.Printf("answer: %v", err)
	}
}
