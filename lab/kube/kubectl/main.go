// Command kubectl is the real one, in a file of its own: tests start it thousands of times, and the start of
// all Kubernetes programs in one file takes it twice the CPU.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
)

func main() {
	os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
}
