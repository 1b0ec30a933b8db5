//! How KKP's controllers are recognised: by their Deployment, as KKP's operator makes it.
//!
//! Its name alone says nothing: someone else may give that name to a Deployment elsewhere. KKP's also
//! selects its pods by that name, and is in a namespace with a Seed or a KubermaticConfiguration.

use serde_json::Value;

/// The Deployment whose presence says that KKP's controllers keep the clusters of a seed.
pub const DEPLOYMENT: &str = "kubermatic-seed-controller-manager";

/// What its pods are selected by, in every release, beside the name of the Deployment.
const NAME_LABEL: &str = "app.kubernetes.io/name";

/// Whether a Deployment of that name selects pods as KKP's does.
pub fn selects_its_pods(deployment: &Value) -> bool {
    let labels = deployment.pointer("/spec/selector/matchLabels");
    labels.and_then(|labels| labels.get(NAME_LABEL)).and_then(Value::as_str) == Some(DEPLOYMENT)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_deployment_of_that_name_that_selects_other_pods_is_not_kkps() {
        let selecting = |labels: Value| {
            selects_its_pods(&json!({"metadata": {"name": DEPLOYMENT, "namespace": "kubermatic"},
                "spec": {"selector": {"matchLabels": labels}}}))
        };
        assert!(selecting(json!({"app.kubernetes.io/name": DEPLOYMENT})));
        for other in [json!({"app": DEPLOYMENT}), json!({"app.kubernetes.io/name": "web"}), json!(null)] {
            assert!(!selecting(other));
        }
    }
}
