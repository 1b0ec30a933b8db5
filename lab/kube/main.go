// Command kube is every Kubernetes program of the lab in one file.
//
// The name it is started under decides what it is, as with busybox: the lab makes symbolic links named
// kube-apiserver, kubelet and so on. One binary instead of six shares most of its pages in memory and on
// disk, and, being static, is the whole content of the container image that hosted control planes run from.
// An image can also name the program as the first argument, as pods do with kubectl, which is a file of its
// own beside this one. etcd is here for hosted control planes too: its client is in the API server anyway.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var names = []string{
	"kube-apiserver", "kube-controller-manager", "kube-scheduler",
	"kubelet", "kube-proxy", "kubectl", "etcd",
}

func program(name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return controllermanager.NewControllerManagerCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kubelet":
		// It listens for signals itself.
		return kubelet.NewKubeletCommand(context.Background())
	case "kube-proxy":
		return proxy.NewProxyCommand()
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	}
	return nil
}

func main() {
	name := filepath.Base(os.Args[0])
	if !slices.Contains(names, name) && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	if name == "etcd" {
		// It ends the process itself.
		etcdmain.Main(os.Args)
	}
	command := program(name)
	if command == nil {
		fmt.Fprintf(os.Stderr, "start me under one of these names: %s\n", strings.Join(names, ", "))
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
