//! What the demo prints: where each cluster is, and lines to paste that show it.

use std::path::Path;

use anyhow::Result;

use crate::operated::{CLUSTERS, Operated};

/// The text, for files in `folder`. Lines to paste begin with two blanks.
pub(super) fn guide(operated: &Operated, folder: &Path) -> Result<String> {
    let with_workers = !operated.workers.is_empty();
    let row = |name: &str, strategy: &str, address: &str, kubeconfig: &str| {
        format!("{name:<11}  {strategy:<12}  {address:<52}  {kubeconfig}\n")
    };
    let mut table = row("CLUSTER", "STRATEGY", "ADDRESS", "KUBECONFIG");
    for ((name, strategy), cluster) in CLUSTERS.iter().zip(&operated.hosted) {
        table += &row(name, strategy, operated.access(cluster)?.server(), &kubeconfig(folder, name));
    }
    Ok(format!(
        "\nA seed with the operator, and three user clusters{}: real Kubernetes, all of it.\n\n\
         {table}\n\
         The names resolve on hosts of the lab. As root, in another terminal, open a shell on one of them,\n\
         outside the seed. It has kubectl, portico and the kubeconfigs, and ends with the demo:\n\
         \x20 {}/shell\n\n\
         What users see\n{}\n\
         What an operator sees on the seed, which kubectl and portico ask unless told otherwise\n{}\n\
         What heals by itself: delete it, and it comes back with the port that users know\n\
         \x20 kubectl get service apiserver-external -n cluster-by-port\n\
         \x20 kubectl delete service apiserver-external -n cluster-by-port\n\n\
         Ctrl-C takes everything down.\n",
        if with_workers { " with a worker each" } else { " without workers" },
        folder.display(),
        lines(&of_users(with_workers)),
        lines(&on_the_seed(with_workers)),
    ))
}

fn kubeconfig(folder: &Path, name: &str) -> String {
    folder.join(format!("{name}.kubeconfig")).display().to_string()
}

fn lines(commands: &[&str]) -> String {
    commands.iter().map(|command| format!("  {command}\n")).collect()
}

fn of_users(with_workers: bool) -> Vec<&'static str> {
    if !with_workers {
        return vec![
            "kubectl --kubeconfig by-port.kubeconfig get namespaces",
            "kubectl --kubeconfig by-balancer.kubeconfig get services",
            "kubectl --kubeconfig by-name.kubeconfig version",
        ];
    }
    vec![
        "kubectl --kubeconfig by-port.kubeconfig get nodes -o wide",
        "kubectl --kubeconfig by-balancer.kubeconfig logs web --tail 3",
        "kubectl --kubeconfig by-name.kubeconfig exec web -- cat /etc/hostname",
        "kubectl --kubeconfig by-name.kubeconfig get pods -A",
    ]
}

fn on_the_seed(with_workers: bool) -> Vec<&'static str> {
    let mut commands = vec![
        "kubectl get clusters",
        "kubectl describe cluster by-port",
        "kubectl get pods -A",
        "portico status",
        "portico why by-port",
        "portico kubeconfig by-name -o mine.kubeconfig",
    ];
    if with_workers {
        commands.push("portico why by-name/worker-by-name");
    }
    commands
}
